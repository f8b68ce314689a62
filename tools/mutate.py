"""Break one line at a time and see whether the test that docs/features.md names fails.  python tools/mutate.py --help

`tools/faults/*.yaml` hold the faults: exact replacements of a text that occurs once in its file, below the row of
docs/features.md that breaks. Each is applied to a copy of its own, in which only its test runs. The outcome is written
into docs/testing.md.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parent.parent
PROJECT = "{{cookiecutter.proj_name}}"
FAULTS = REPO / "tools" / "faults"
PAGE = REPO / "docs" / "testing.md"
BEGIN, END = "<!-- faults: written by `make mutate` -->", "<!-- end of faults -->"
OUTSIDE = "template:"  # before a file or test that lies beside the project, not in it
PROOFS = "engine:"  # before a test of the engine that no rendered project has
FOLDERS = {"": "tests", OUTSIDE: "tests/template", PROOFS: "tests/engine"}
NAMED_TEST = re.compile(r"`([^`]+\.py::\w+)`")
MARK = "MUTATE_COPY"  # an environment variable by which whatever a test leaves running is found


@dataclass(frozen=True)
class Fault:
    """One wrong line."""

    row: str  # the feature that it breaks
    says: str
    file: str
    old: str
    new: str
    test: str  # "file.py::test" as in docs/features.md; "[case]" behind it runs that case alone

    @property
    def path(self) -> str:
        """The file, from the root of the template."""
        return self.file.removeprefix(OUTSIDE) if self.file.startswith(OUTSIDE) else f"{PROJECT}/{self.file}"

    @property
    def room(self) -> str:
        """The folder whose code is broken; the packages of the engine one by one."""
        parts = self.file.removeprefix(OUTSIDE).split("/")
        if self.file.startswith(OUTSIDE):
            return "the template"
        if len(parts) == 1:
            return "programs"
        return "/".join(parts[:2]) if parts[0] in ("common", "custom") and len(parts) > 2 else parts[0]


def features(page: Path = REPO / "docs" / "features.md") -> dict[str, list[str]]:
    """Return the tests that each row of docs/features.md names."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = (line.strip("|").split("|") for line in lines if line.count("|") == 5)
    return {row[0].strip(): NAMED_TEST.findall(row[3]) for row in rows if NAMED_TEST.search(row[3])}


def faults() -> list[Fault]:
    """Read tools/faults/*.yaml. Raises `TypeError` for an entry with a missing or unknown key."""
    found = []
    for file in sorted(FAULTS.glob("*.yaml")):
        for row, entries in yaml.safe_load(file.read_text(encoding="utf-8")).items():
            found += [Fault(row, entry.pop("fault"), **entry) for entry in entries]
    return found


def broken(fault: Fault, root: Path = REPO) -> str:
    """Return the text of the fault's file with the fault in it. Raises `ValueError` if it does not fit the file."""
    try:
        text = (root / fault.path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{fault.file}: {error.strerror}") from None
    if (count := text.count(fault.old)) != 1:
        near = f" (it begins in line {line})" if (line := _line(text, fault.old)) else ""
        raise ValueError(f"{fault.file} has the old text {count} times instead of once{near}")
    text = text.replace(fault.old, fault.new)
    if fault.file.endswith(".py"):
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{fault.file}:{error.lineno}: {error.msg}, with the fault in it") from None
    return text


def _line(text: str, old: str) -> int:
    """Return where the first line of `old` is, to help mend the entry; 0 for nowhere."""
    first = old.strip().splitlines()[0]
    return text[: text.index(first)].count("\n") + 1 if first in text else 0


class Workshop:
    """Copies of the template in a scratch folder, and tests run in them."""

    def __init__(self, scratch: Path, jobs: int) -> None:
        self.scratch, self.jobs = scratch, jobs
        self.venv = REPO / ".venv" if (REPO / ".venv").is_dir() else scratch / "venv"
        self.venv.mkdir(exist_ok=True)
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=REPO, check=True, capture_output=True, text=True
        )
        self.files = [name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]

    def copy(self, name: str) -> Path:
        """Return a fresh copy of all files that git knows or would add."""
        root = self.scratch / name
        for file in self.files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / file, root / file)
        (root / ".venv").symlink_to(self.venv)  # where some tests keep environments of their own
        return root

    def pytest(self, root: Path, tests: list[str], limit: float | None, *options: str) -> tuple[int | None, str]:
        """Run tests of one kind, project's, engine's or template's, in a copy.

        Returns the exit code, None if they did not end within `limit` seconds, and the output.
        """
        folder = root / PROJECT if kind_of(tests[0]) == "" else root
        names = [path_of(test) for test in tests]
        (temporary := root.with_name(f"{root.name}.tmp")).mkdir(exist_ok=True)
        environment = {
            **os.environ, MARK: str(root), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *options, *names]
        with (temporary / "output").open("w+", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_all(root)
                process.wait()
            output.seek(0)
            return code, output.read()

    def durations(self, tests: list[str]) -> dict[str, float]:
        """Run tests where nothing is broken. Return the seconds of those that pass; others are left out."""
        passed: dict[str, float] = {}
        root = self.copy("whole")
        for number, kind in enumerate(("", OUTSIDE, PROOFS)):
            if not (some := [test for test in tests if kind_of(test) == kind]):
                continue
            report = self.scratch / f"whole-{number}.xml"
            _, output = self.pytest(root, some, None, f"--junitxml={report}", f"-n{self.jobs}", "--dist=loadfile")
            results = list(outcomes(report)) if report.is_file() else []
            for test in some:
                cases = [(seconds, good) for name, seconds, good in results if of_test(name, test)]
                if cases and all(good for _, good in cases):
                    passed[test] = sum(seconds for seconds, _ in cases)
            if len([test for test in some if test in passed]) < len(some):
                print(output[-6000:])
        return passed

    def outcome(self, number: int, fault: Fault, seconds: float) -> str:
        """Apply a fault and run its test: "caught", "missed", or why neither is known."""
        root = self.copy(str(number))
        try:
            (root / fault.path).write_text(broken(fault), encoding="utf-8")
            code, output = self.pytest(root, [fault.test], 60 + 5 * seconds, "-x")
            if code in (1, None):
                return "caught" if code else "caught (the test did not end)"
            return "missed" if code == 0 else f"pytest ended with {code}: {output[-500:]}"
        except ValueError as error:
            return f"does not apply: {error}"
        finally:
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(root.with_name(f"{root.name}.tmp"), ignore_errors=True)


def kind_of(test: str) -> str:
    """Return the prefix of a test's name: none for the project's own."""
    return next((kind for kind in (OUTSIDE, PROOFS) if test.startswith(kind)), "")


def path_of(test: str) -> str:
    """Return where a test lies, below the project for its own and the root of the template for others."""
    return f"{FOLDERS[kind_of(test)]}/{test.removeprefix(kind_of(test))}"


def outcomes(report: Path) -> Iterator[tuple[str, float, bool]]:
    """Yield name, seconds and success of each test in a JUnit file."""
    for case in ET.parse(report).getroot().iter("testcase"):
        good = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        yield f"{case.get('classname', '')}::{case.get('name', '')}", float(case.get("time", 0)), good


def of_test(name: str, test: str) -> bool:
    """Return whether a JUnit case, `tests.optim.test_ema::test_x[1]`, belongs to a test, `optim/test_ema.py::test_x`.

    Tests of the engine are named from their own folder, `optim.test_groups::test_x`.
    """
    file, _, function = path_of(test).removeprefix("tests/engine/").partition("::")
    return name.split("[")[0] == f"{file[:-3].replace('/', '.')}::{function.split('[')[0]}" and (
        "[" not in function or name.endswith(f"::{function}")
    )


def end_all(root: Path) -> None:
    """Kill whatever was started in a copy, or in any below `root`, and still runs, also in sessions of its own."""
    wanted = f"{MARK}={root}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found = (folder / "environ").read_bytes().split(b"\0")
            if wanted in found or any(each.startswith(wanted + b"/") for each in found):
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue  # it has ended, or belongs to another user


def report(results: dict[Fault, str]) -> str:
    """Return the part of docs/testing.md between its marks."""
    total, good = Counter(fault.room for fault in results), Counter[str]()
    for fault, outcome in results.items():
        good[fault.room] += outcome.startswith("caught")
    share = f"**{sum(good.values())} of {len(results)} faults are caught by the test that is named for them.**"
    lines = ["", share, ""]
    lines += ["| where | caught |", "|---|---|"]
    lines += [f"| {room} | {good[room]} of {total[room]} |" for room in sorted(total)]
    lines += ["", "| feature | fault | file | test | outcome |", "|---|---|---|---|---|"]
    for fault, outcome in results.items():
        cells = (fault.row, fault.says, f"`{fault.file}`", f"`{fault.test}`", outcome.splitlines()[0][:80])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n\n"


def recorded(page: str) -> dict[tuple[str, str], str]:
    """Return the outcomes that the page has, by row and fault."""
    inside = page.partition(BEGIN)[2].partition(END)[0]
    lines = inside.partition("| feature |")[2].splitlines()[2:]
    cells = (re.split(r"(?<!\\)\|", line.strip("|")) for line in lines if line)
    return {(row[0].strip(), row[1].strip().replace("\\|", "|")): row[4].strip() for row in cells}


def write(results: dict[Fault, str]) -> None:
    """Put outcomes into docs/testing.md; those of faults that did not run now stay as they are there."""
    page = PAGE.read_text(encoding="utf-8")
    before = recorded(page)
    now = before | {(fault.row, fault.says): outcome for fault, outcome in results.items()}
    every = {fault: now.get((fault.row, fault.says), "not run yet") for fault in faults()}
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{report(every)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def chosen(words: Iterable[str]) -> list[Fault]:
    """Return the faults in whose row, words, file or test one of the words occurs; without words, all."""
    texts = {fault: f"{fault.row}\n{fault.says}\n{fault.file}\n{fault.test}" for fault in faults()}
    return [fault for fault, text in texts.items() if not words or any(word in text for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description="break one line at a time; see whether the named test fails")
    parser.add_argument("words", nargs="*", help="only faults in whose row, text, file or test one of these occurs")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--open", action="store_true", help="only faults that docs/testing.md does not call caught")
    parser.add_argument("--check", action="store_true", help="only say which faults do not fit their files any more")
    given = parser.parse_args()
    some, began = chosen(given.words), time.monotonic()
    results: dict[Fault, str] = {}
    if given.open:
        known = recorded(PAGE.read_text(encoding="utf-8"))
        some = [each for each in some if not known.get((each.row, each.says), "").startswith("caught")]
    for fault in some:
        try:
            broken(fault)
        except ValueError as error:
            results[fault] = f"does not apply: {error}"
            print(f"{fault.row}: {fault.says}: {results[fault]}")
    if given.check or not some:
        return bool(results) or not some
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:

        def stop(number: int, _: object) -> None:
            end_all(Path(scratch))
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        workshop = Workshop(Path(scratch), given.jobs)
        print(f"{len(some)} faults; first their tests without them", flush=True)
        seconds = workshop.durations(sorted({fault.test for fault in some if fault not in results}))

        def one(item: tuple[int, Fault]) -> None:
            number, fault = item
            if fault not in results:
                results[fault] = "its test does not pass without it"
                if fault.test in seconds:
                    results[fault] = workshop.outcome(number, fault, seconds[fault.test])
            print(f"{results[fault]:8} {fault.row}: {fault.says} ({fault.file}, {fault.test})", flush=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(one, enumerate(some)))
    write(results)
    caught = sum(outcome.startswith("caught") for outcome in results.values())
    minutes = (time.monotonic() - began) / 60
    print(f"{caught} of {len(results)} caught in {minutes:.0f} minutes; {PAGE.relative_to(REPO)} has the table")
    return caught < len(results)


if __name__ == "__main__":
    sys.exit(main())
