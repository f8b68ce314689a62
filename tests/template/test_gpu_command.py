"""`make test-gpu` and `make bench-gpu`, as far as they can be tried without a GPU; see also tests/engine/gpu."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from support import REPO

# Without the variables by which pytest would take itself for one of the processes that run this file, and make for a
# part of the make that runs it.
OUTER = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE", "MFLAGS"))}
NONE = {**OUTER, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
SUITE = ["tools/gpu.py", "test", "--device", "cpu"]
LISTED = """amp batches nccl compile cuda_graphs fsdp operators resume out_of_memory assert deterministic memory
    accelerator cpu"""
MARK = re.compile(r'\bmark\.gpu\("')
MODELS = """
import torch
from gpu_models import SHAPES
with torch.device("meta"):
    for shape in SHAPES.values():
        print(shape.name, shape.parameters, sum(p.numel() for p in shape.bare().parameters()) / 1e6)
"""


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = {"cwd": REPO, "env": NONE, "timeout": 500, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["test-gpu", "bench-gpu"])
def test_without_a_gpu_it_says_so_in_a_sentence(command: str) -> None:
    """And ends with an error: nothing that was not run looks as if it had passed."""
    done = run("make", command, f"GPU_PYTHON={sys.executable}")
    assert done.returncode == 2  # of make
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1
    assert said[0].startswith("There is no NVIDIA GPU that PyTorch can use, so nothing was run")
    assert done.stdout == ""
    assert not (REPO / "gpu-results.json").exists()


def test_without_pytorch_it_names_what_to_do(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare"))
    done = run("make", "test-gpu", f"GPU_PYTHON={tmp_path / 'bare' / 'bin' / 'python'}")
    assert done.returncode == 2
    assert "has no PyTorch; name a Python that has it: make test-gpu GPU_PYTHON=..." in done.stderr


@pytest.mark.slow
def test_each_item_has_a_test(tmp_path: Path) -> None:
    """The list of the demand, as a list here: an item without a test, and a test without an item, are noticed."""
    done = run(sys.executable, *SUITE, "--collect", "--output", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    tests = json.loads((tmp_path / "results.json").read_text())["test"]["tests"]
    assert {test["item"].replace(" ", "_") for test in tests} == set(LISTED.split())
    names = {re.sub(r"\[.*", "", test["test"]).rpartition("::")[2] for test in tests}
    marked = {
        f"tests/template/{file.name}" for file in REPO.glob("tests/template/test_*.py") if MARK.search(file.read_text())
    }
    assert marked == {test["test"].partition("::")[0] for test in tests if test["test"].startswith("tests/template/")}
    assert {"test_replicas_train_as_one_process_does", "test_one_gpu_trains_as_the_cpu_does"} <= names


@pytest.mark.slow
@pytest.mark.full
def test_what_a_python_with_torch_lacks_comes_in_a_folder(tmp_path: Path) -> None:
    """Wheels are collected for this Python; with them, one that has nothing but torch runs tests and writes results."""
    version, wheels = f"{sys.version_info.major}.{sys.version_info.minor}", tmp_path / "wheels"
    words = ["make", "gpu-wheels", f"GPU_PYTHON={sys.executable}", f"GPU_PYTHON_VERSION={version}"]
    done = run(*words, f"ARGS=--wheels {wheels}")
    assert done.returncode == 0, done.stderr
    assert re.match(rf"\d+ wheels for Python {re.escape(version)}, \d+ MB, in", done.stdout)
    assert sum(wheel.stat().st_size for wheel in wheels.iterdir()) < 64e6
    assert not list(wheels.glob("torch-*"))
    python = only_torch(tmp_path / "only")
    output = tmp_path / "results.json"
    words = [python, *SUITE, "--wheels", str(wheels), "--output", str(output), "--jobs", "1", "--suites", "engine"]
    done = run(*words, "--only", "random_states or pinned or beyond")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages from wheels, beside those of" in done.stdout
    results = json.loads(output.read_text())
    assert results["test"]["outcomes"] == {"passed": 3}
    assert {test["item"] for test in results["test"]["tests"]} == {"accelerator", "batches", "amp"}
    assert results["machine"]["torch"] == metadata.version("torch")
    table = run(sys.executable, "tools/gpu.py", "table", "--output", str(output)).stdout
    assert "| mixed precision in both formats, with the scaler | 1 | 0 | 0 |" in table
    # Without the folder, it names what is missing.
    done = run(*words[:-6], "--wheels", str(tmp_path / "none"), "--output", str(output))
    assert done.returncode == 1
    assert "pydantic" in done.stderr
    assert "make gpu-wheels" in done.stderr


def only_torch(folder: Path) -> str:
    """Return a Python that has torch and what torch needs, by links, and nothing else but pip."""
    run(sys.executable, "-m", "venv", str(folder))
    (place,) = folder.glob("lib/python*/site-packages")
    wanted, known = ["torch"], set()
    while wanted:
        name = wanted.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system
        known.add(name)
        needs = [re.split(r"[^\w.-]", line)[0] for line in package.requires or () if "extra ==" not in line]
        wanted += [need for need in needs if need not in known]
        for top in {Path(str(file)).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (place / top).exists():
                (place / top).symlink_to(str(package.locate_file(top)))
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_the_models_have_their_published_sizes() -> None:
    """25.6 M, 22.1 M and 124.4 M parameters: what is timed is what its name says."""
    done = run(sys.executable, "-c", MODELS, cwd=REPO / "bench")
    assert done.returncode == 0, done.stderr
    sizes = {name: (float(wanted), float(count)) for name, wanted, count in map(str.split, done.stdout.splitlines())}
    assert [wanted for wanted, _ in sizes.values()] == [25.6, 22.1, 124.4]
    assert all(round(count, 1) == wanted for wanted, count in sizes.values()), sizes
