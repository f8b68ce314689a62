"""What only an NVIDIA GPU can show: tests and timings, with their results in one file, also without a network.

    python tools/gpu.py wheels [--python-version 3.12]    collect what a Python with torch may lack; needs the internet
    python tools/gpu.py test [--device cpu]               run every test that is marked gpu
    python tools/gpu.py bench [-- options of bench/gpu.py]
    python tools/gpu.py table                             the results as tables, for docs/gpu.md

`make gpu-wheels`, `make test-gpu` and `make bench-gpu` call it. It needs nothing but the standard library: where the
Python that runs it lacks packages, and the folder of wheels has them, they are installed into a folder of their own,
beside that Python's torch.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.proj_name}}"
WHEELS, RESULTS = ROOT / ".gpu-wheels", ROOT / "gpu-results.json"
NO_GPU = "There is no NVIDIA GPU that PyTorch can use, so nothing was run"
# What the tests of this list are marked with; each item has at least one.
ITEMS = {
    "amp": "mixed precision in both formats, with the scaler",
    "batches": "pinned and prefetched batches",
    "nccl": "exchanges by NCCL, in a group of one process and of one per device",
    "compile": "torch.compile with inductor",
    "cuda graphs": "CUDA graphs, by the mode reduce-overhead",
    "fsdp": "sharded models, in a group of one process and of one per device",
    "operators": "operators built by nvcc, checked and trained",
    "resume": "cut and resumed to the same bits",
    "out of memory": "what a person reads when memory runs out",
    "assert": "what a person reads after a device-side assert",
    "deterministic": "dist.deterministic strict and warn",
    "memory": "numbers on memory",
    "accelerator": "torch.accelerator and the random states of the device",
    "cpu": "the same weights as on the CPU",
}
# The two groups of tests, which have settings of their own. Those of the template render a project; its other files
# need packages that are not among the wheels.
SUITES = {
    "engine": ("tests/engine/gpu",),
    "template": ("tests/template/test_gpus.py", "tests/template/test_ops_cuda.py"),
}
# Needed beside the project's own requirements, from the lists of what its tests and the template's need.
ALSO = ("pytest", "pytest-xdist", "cookiecutter")
# Names of modules that differ from those of their packages.
MODULES = {"pyyaml": "yaml", "pillow": "PIL", "pytest-xdist": "xdist"}
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
LARGEST_MB = 64
REPORT, UNTIL = "GPU_REPORT", "GPU_UNTIL"  # for the tests: where each leaves its outcome, and when the last may begin


def requirements() -> dict[str, str]:
    """Return the lines of all that is needed beside torch, by the name of the package."""
    lists = [PROJECT / "requirements.txt", PROJECT / "requirements-dev.txt", ROOT / "requirements-dev.txt"]
    needed = {}
    for number, file in enumerate(lists):
        for line in file.read_text(encoding="utf-8").splitlines():
            name = re.split(r"[^\w.-]", line)[0]
            if name and name != "torch" and (number == 0 or name in ALSO):
                needed[name] = line
    return needed


def missing() -> list[str]:
    """Return the packages that this Python lacks."""
    modules = {name: MODULES.get(name, name) for name in requirements()}
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is None]


def collect(options: argparse.Namespace) -> int:
    """Download the wheels of all that is needed, and of what that needs, for a Python and Linux on x86-64."""
    options.wheels.mkdir(exist_ok=True)
    for wheel in options.wheels.glob("*.whl"):
        wheel.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", options.python_version, "--dest", str(options.wheels)]
    for name in PLATFORMS:
        command += ["--platform", f"{name}_{options.machine}"]
    done = subprocess.run(
        [*command, "--constraint", str(ROOT / "constraints.txt"), *requirements().values()], check=False
    )
    if done.returncode:
        return done.returncode
    sizes = [wheel.stat().st_size for wheel in options.wheels.glob("*.whl")]
    total = sum(sizes) / 1e6
    print(f"{len(sizes)} wheels for Python {options.python_version}, {total:.0f} MB, in {options.wheels}")
    if total > LARGEST_MB:
        print(f"they are larger than {LARGEST_MB} MB together", file=sys.stderr)
    return int(total > LARGEST_MB)


def python_with_all(folder: Path, wheels: Path) -> str:
    """Return a Python that has this one's packages, and those of the wheels that this one lacks."""
    lacks = missing()
    if not lacks:
        return sys.executable
    there = {re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower(): wheel for wheel in wheels.glob("*.whl")}
    if not there:
        sys.exit(
            f"{sys.executable} lacks {', '.join(lacks)}. Where there is a network: make setup. Where there is none: "
            f"run `make gpu-wheels` elsewhere, and bring the folder {wheels.name} along."
        )
    wanted = [str(wheel) for name, wheel in there.items() if not _is_installed(name)]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (place,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(place), *wanted], check=True)
    parents = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in parents]
    (place / "beside.pth").write_text("".join(lines), encoding="utf-8")
    print(f"== {len(wanted)} packages from {wheels.name}, beside those of {sys.executable}", flush=True)
    return str(folder / "bin" / "python")


def _is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def machine() -> dict[str, Any]:
    """Return the device, its driver, and the versions of all that computes."""
    import torch

    about: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"(.+)"),
        "nvcc": _said([shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"], r"\bV(\d[\d.]*)"),
        "compiler": _said(["c++", "--version"], r"(.+)"),
        "devices": [],
    }
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        about["devices"].append(
            {
                "name": device.name,
                "GiB": round(device.total_memory / 2**30, 1),
                "capability": f"{device.major}.{device.minor}",
            }
        )
    return about


def _said(command: list[str], pattern: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    match = re.search(pattern, done.stdout)
    return match[1].strip() if match and not done.returncode else None


def store(file: Path, part: str, results: dict[str, Any]) -> None:
    """Write a part of the results; the other part stays if it is of the same machine."""
    about = machine()
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = kept if kept.get("machine") == about else {}
    version = (PROJECT / "common" / "VERSION").read_text(encoding="utf-8").strip()
    commit = _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"], r"(\w+)")
    kept |= {"template": version, "commit": commit, "machine": about}
    kept[part] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **results}
    whole = file.with_name(f"{file.name}.new")
    whole.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    whole.replace(file)


def test(options: argparse.Namespace) -> int:
    """Run the tests. Each leaves its outcome at once, so that what was done before an interruption is not lost."""
    start, code = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.jsonl")
        python = python_with_all(Path(name, "python"), options.wheels)
        environment = {
            **os.environ, "GPU_TESTS_DEVICE": options.device, REPORT: str(report), "OMP_NUM_THREADS": "1",
            UNTIL: str(time.time() + 60 * options.minutes), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        for suite, files in SUITES.items():
            if suite not in options.suites:
                continue
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu", "-m", "gpu", *files]
            several = options.jobs > 1 and not options.collect
            command += ["-n", str(options.jobs)] if several else []
            command += ["-k", options.only] if options.only else []
            command += ["--collect-only"] if options.collect else []
            print(f"== {suite}", flush=True)
            ended = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            code = code or (0 if ended == 5 else ended)  # 5: none is selected
            store(options.output, "test", summary(report, options.device, time.monotonic() - start))
    results = json.loads(options.output.read_text(encoding="utf-8"))["test"]
    for item in ITEMS if options.collect else ():
        print(f"{item}: {sum(test['item'] == item for test in results['tests'])} tests")
    print(f"== {results['outcomes']} in {results['seconds']:.0f} s: {options.output}")
    return code


def summary(report: Path, device: str, seconds: float) -> dict[str, Any]:
    """Return the outcomes so far."""
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    tests = sorted(map(json.loads, lines), key=lambda entry: (list(ITEMS).index(entry["item"]), entry["test"]))
    outcomes = dict(Counter(entry["outcome"] for entry in tests))
    return {"device": device, "seconds": round(seconds, 1), "outcomes": outcomes, "tests": tests}


def bench(options: argparse.Namespace) -> int:
    """Run bench/gpu.py, which writes its figures after each comparison."""
    with tempfile.TemporaryDirectory() as name:
        python, figures = python_with_all(Path(name, "python"), options.wheels), Path(name, "figures.json")
        command = [python, "bench/gpu.py", "--device", options.device, "--output", str(figures), *options.more]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if figures.exists():
            store(options.output, "bench", json.loads(figures.read_text(encoding="utf-8")))
            print(f"== {options.output}")
    return code


def table(options: argparse.Namespace) -> int:
    """Print the results as Markdown."""
    if not options.output.exists():
        sys.exit(f"{options.output} does not exist: make test-gpu and make bench-gpu write it")
    print("\n".join(rows(json.loads(options.output.read_text(encoding="utf-8")))))
    return 0


def rows(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the tables."""
    about = results["machine"]
    names = Counter(f"{device['name']} ({device['GiB']} GiB)" for device in about["devices"])
    devices = ", ".join(f"{count} x {name}" for name, count in names.items()) or "CPU"
    versions = (
        f"{key} {about[key]}" for key in ("driver", "torch", "cuda", "cudnn", "nccl", "nvcc", "python") if about[key]
    )
    yield f"{devices}; {', '.join(versions)}; template {results['template']}, commit {(results['commit'] or '?')[:10]}."
    if "test" in results:
        yield from ("", f"`make test-gpu`, {results['test']['date'][:10]}, {results['test']['seconds']:.0f} s:", "")
        yield from ("| what | passed | failed | not run | seconds |", "|---|---|---|---|---|")
        for item, words in ITEMS.items():
            tests = [entry for entry in results["test"]["tests"] if entry["item"] == item]
            counts = Counter(entry["outcome"] for entry in tests)
            seconds = sum(entry["seconds"] for entry in tests)
            yield f"| {words} | {counts['passed']} | {counts['failed']} | {counts['not run']} | {seconds:.0f} |"
    if "bench" in results:
        yield from ("", f"`make bench-gpu`, {results['bench']['date'][:10]}, {results['bench']['settings']}:", "")
        yield "| model | | batch | samples/s | TFLOP/s | MFU | bare loop: samples/s | time by that of the bare loop |"
        yield "|---|---|---|---|---|---|---|---|"
        for row in results["bench"]["rows"]:
            if "error" in row:
                yield f"| {row['model']} | {row['mode']} | {row['batch']} | {row['error']} | | | | |"
                continue
            mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
            low, middle, high = row["ratios"]
            yield (
                f"| {row['model']} | {row['mode']} | {row['batch']} | {row['samples_per_s']:.4g} "
                f"| {row['tflops']:.4g} | {mfu} | {row['bare_samples_per_s']:.4g} "
                f"| {middle:.3f} ({low:.3f} to {high:.3f}) |"
            )


# What follows is a plugin of pytest (-p gpu), in the processes that run the tests.


def pytest_collection_modifyitems(items: Iterable[Any]) -> None:
    """Give each test the item of the list that it is for. A test may not be for something else."""
    for test in items:
        (item,) = {mark.args[0] for mark in test.iter_markers("gpu")} or {None}
        if item is not None and item not in ITEMS:
            raise ValueError(f"{test.nodeid}: {item} is not in ITEMS of tools/gpu.py")
        test.user_properties.append(("item", item))


def pytest_collection_finish(session: Any) -> None:
    """If the tests are only collected, count them as not run."""
    if session.config.option.collectonly:
        for test in session.items:
            _leave(dict(test.user_properties)["item"], test.nodeid, "not run", 0.0, "only collected", {})


def pytest_runtest_setup(item: Any) -> None:
    """Begin no test when the time is over."""
    if time.time() > float(os.environ[UNTIL]):
        import pytest

        pytest.skip("not run: the time is over; a larger --minutes gives more")


def pytest_runtest_logreport(report: Any) -> None:
    """Write down the outcome; with several test processes, in the one that they report to."""
    if report.when == "call" or report.outcome != "passed":
        if os.environ.get("PYTEST_XDIST_WORKER"):
            return
        properties = dict(report.user_properties)
        why = ""
        if report.skipped:
            why = str(report.longrepr[2]).removeprefix("Skipped: ").removeprefix("not run: ")
        elif report.failed:
            why = str(report.longrepr)[-4000:]
        outcome = "not run" if report.skipped else report.outcome
        _leave(properties.pop("item", None), report.nodeid, outcome, report.duration, why, properties)


def _leave(item: str | None, name: str, outcome: str, seconds: float, why: str, values: dict[str, Any]) -> None:
    entry: dict[str, Any] = {"item": item, "test": name, "outcome": outcome, "seconds": round(seconds, 2)}
    entry |= ({"why": why} if why else {}) | ({"values": values} if values else {})
    with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, default=str) + "\n")


def main() -> int:
    """Read the command line, refuse what cannot be done, do the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("wheels", "test", "bench", "table"):
        command = commands.add_parser(name)
        command.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels")
        command.add_argument("--output", type=Path, default=RESULTS, help="file of results")
        if name == "wheels":
            command.add_argument("--python-version", default="3.12", help="of the Python that has torch")
            command.add_argument("--machine", default="x86_64", help="or aarch64")
        if name in ("test", "bench"):
            command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the tests")
        if name == "test":
            command.add_argument("--jobs", type=int, default=4, help="tests at a time")
            command.add_argument("--minutes", type=float, default=8.0, help="after which no further test begins")
            command.add_argument("--only", help="as pytest's -k")
            command.add_argument("--collect", action="store_true", help="run none; say how many there are")
            command.add_argument("--suites", nargs="+", choices=tuple(SUITES), default=tuple(SUITES))
        if name == "bench":
            command.add_argument("more", nargs="*", help="options of bench/gpu.py, after --")
    options = parser.parse_args()
    if options.command in ("test", "bench"):
        options.output = options.output.absolute()
        if importlib.util.find_spec("torch") is None:
            sys.exit(
                f"{sys.executable} has no PyTorch; name a Python that has it: make {options.command}-gpu GPU_PYTHON=..."
            )
        if options.device == "cuda" and not getattr(options, "collect", False):
            import torch

            if not torch.cuda.is_available():
                why = "" if torch.version.cuda else f": {sys.executable} has a PyTorch without CUDA"
                sys.exit(f"{NO_GPU}{why}.")
    return {"wheels": collect, "test": test, "bench": bench, "table": table}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
