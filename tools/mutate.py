"""Break the code in one place at a time and see whether the test that is named for it fails.  make mutate

Each `faults.yaml` beside the tests is a list of faults. A fault names a function, a text that occurs once in it, what
the text becomes, and a test. The test runs in a copy of the repository with the fault in it. A fault whose text is gone
is skipped with a notice; --drop takes it off its list.
"""

import argparse
import ast
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parent.parent
PROJECT = "{{cookiecutter.proj_name}}"
MARK = "MUTATE_COPY"  # an environment variable by which whatever a test leaves running is found
LONGEST = 600.0  # seconds that a test may take without a fault


@dataclass(frozen=True)
class Fault:
    """One entry of a `faults.yaml`. Paths are below the project or, if they are not there, below the repository."""

    fault: str  # what is wrong with the code then
    code: str  # "path.py::Class.method"; a path alone means the whole file
    text: str  # occurs once in the function
    becomes: str
    test: str  # "path.py::test", or one case of it

    @property
    def file(self) -> str:
        """The file that is broken, from the root of the repository."""
        return below(self.code.partition("::")[0])

    def broken(self) -> str:
        """Return the text of the file with the fault in it. Raises `ValueError` if the fault does not fit."""
        path = REPO / self.file
        if not path.is_file():
            raise ValueError(f"{self.file} is gone")
        text, name = path.read_text(encoding="utf-8"), self.code.partition("::")[2]
        start, end = extent(text, name) if name else (0, len(text))
        count = text.count(self.text, start, end)
        if count != 1:
            raise ValueError(f"{self.code} has the text {count} times: {self.text}")
        changed = text[:start] + text[start:end].replace(self.text, self.becomes) + text[end:]
        if self.file.endswith(".py"):
            try:
                ast.parse(changed)
            except SyntaxError as error:
                raise ValueError(f"{self.code}: {error.msg} with the fault in it") from None
        return changed


def below(path: str) -> str:
    """Return where a path of a fault leads, from the root of the repository."""
    inside = f"{PROJECT}/{path}"
    return inside if (REPO / inside).exists() else path


def extent(text: str, name: str) -> tuple[int, int]:
    """Return where the function or class "Class.method" begins and ends. Raises `ValueError` if there is none."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [child for child in ast.walk(node) if child is not node and getattr(child, "name", "") == part]
        if not found:
            raise ValueError(f"{name} is gone")
        node = found[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def lists() -> dict[Path, list[Fault]]:
    """Return the faults of each list. Raises `TypeError` for an entry with a missing or unknown key."""
    files = sorted((REPO / "tests").rglob("faults.yaml"))
    return {file: [Fault(**entry) for entry in yaml.safe_load(file.read_text(encoding="utf-8"))] for file in files}


def drop(gone: set[Fault]) -> None:
    """Take faults off their lists, whose other lines stay as they are."""
    for file, faults in lists().items():
        head, *entries = file.read_text(encoding="utf-8").split("\n- ")
        kept = [entry for entry, fault in zip(entries, faults, strict=True) if fault not in gone]
        if not kept:
            file.unlink()
        elif len(kept) < len(entries):
            file.write_text("\n- ".join([head, *kept]).rstrip("\n") + "\n", encoding="utf-8")


def copy(root: Path) -> None:
    """Copy all files that git knows or would add."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and (REPO / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, root / name)
    if (REPO / ".venv").is_dir():
        (root / ".venv").symlink_to(REPO / ".venv")  # where some tests keep environments of their own


def end_all(root: Path) -> None:
    """Kill whatever was started in a copy and still runs, also in sessions of its own."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={root}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or belongs to another user


def run(test: str, root: Path, limit: float) -> tuple[int | None, str]:
    """Run a test in a copy. Return the exit code of pytest, None if it took too long, and what it said."""
    is_own = (REPO / PROJECT / test.partition("::")[0]).is_file()  # of the project, else of the template
    folder = root / PROJECT if is_own else root
    temporary = root / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ, MARK: str(root), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", test]
    with (temporary / "output").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
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


@functools.cache
def seconds_without(test: str, scratch: Path) -> float | None:
    """Return how long a test takes without a fault; None if it does not pass."""
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as root:
        copy(Path(root))
        began = time.monotonic()
        code, output = run(test, Path(root), LONGEST)
        if code != 0:
            print(output[-3000:])
        return time.monotonic() - began if code == 0 else None


def outcome(fault: Fault, scratch: Path) -> str:
    """Run the test of a fault with the fault in the code: "caught", "missed", or why neither is known."""
    seconds = seconds_without(fault.test, scratch)
    if seconds is None:
        return "its test does not pass without the fault"
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as root:
        copy(Path(root))
        (Path(root) / fault.file).write_text(fault.broken(), encoding="utf-8")
        code, output = run(fault.test, Path(root), 60 + 5 * seconds)
    if code in (1, None):
        return "caught"
    return "missed" if code == 0 else f"pytest ended with {code}: {output[-500:]}"


def misfits(faults: list[Fault]) -> Iterator[tuple[Fault, str]]:
    """Yield the faults that do not fit the code any more, with the reason."""
    for fault in faults:
        try:
            fault.broken()
        except ValueError as error:
            yield fault, str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description="break the code in one place at a time; see whether the test fails")
    parser.add_argument("words", nargs="*", help="only faults in which one of these words occurs")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--check", action="store_true", help="only list the faults that do not fit the code any more")
    parser.add_argument("--drop", action="store_true", help="take these off their lists")
    given = parser.parse_args()
    every = [fault for faults in lists().values() for fault in faults]
    some = [fault for fault in every if not given.words or any(word in str(fault) for word in given.words)]
    gone = dict(misfits(some))
    for fault, reason in gone.items():
        print(f"skipped   {fault.fault}: {reason}")
    if given.drop:
        drop(set(gone))
    if given.check or given.drop:
        return 0
    fitting = [fault for fault in some if fault not in gone]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    caught = 0
    with (
        tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as scratch,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        results = pool.map(lambda fault: outcome(fault, Path(scratch)), fitting)
        try:
            for fault, result in zip(fitting, results, strict=True):
                caught += result == "caught"
                print(f"{result:9} {fault.fault}  ({fault.code}, {fault.test})", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for root in Path(scratch).iterdir():
                end_all(root)
            raise
    print(f"{caught} of {len(fitting)} faults are caught by the test that is named for them")
    return int(caught < len(fitting))


if __name__ == "__main__":
    sys.exit(main())
