"""tools.check finds the mistakes planted in a project; without them, everything holds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import planting
from planting import CONFIGS, VARIANTS, Fault
from support import TEMPLATE, Render

FAULTS = planting.faults()
HARMLESS = planting.faults(planting.HARMLESS)
EXAMPLES = sorted(file.parent.name for file in TEMPLATE.glob("examples/*/config.yaml"))
SAMPLES = ("default", "ops")
TIMEOUT_S = 900

full = pytest.mark.full


def of_each_check() -> list[Any]:
    """Return the mistakes; all but the first one of each check that fails are marked `full`."""
    known, found = set[str](), []
    for fault in FAULTS:
        marks = [full] if fault.header["breaks"] in known else []
        found.append(pytest.param(fault, id=fault.diff.stem, marks=marks))
        known.add(fault.header["breaks"])
    return found


def check(project: Path, config: str, *only: str) -> dict[str, str]:
    """Run tools.check by the command line. Returns by name what it found of each check, and why."""
    command = [sys.executable, "-m", "tools.check", "--config", config]
    command += ["--only", *only] if only else []
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    found = re.findall(r"  (holds|does NOT hold|does not apply) +(\w+)\n(?:    (.*))?", done.stdout)
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == int(any(outcome == "does NOT hold" for outcome, _, _ in found)), found
    return {name: f"{outcome}: {why}".removesuffix(": ") for outcome, name, why in found}


def failed(found: dict[str, str]) -> dict[str, str]:
    """Return the checks that do not hold, and why."""
    return {name: text for name, text in found.items() if text.startswith("does NOT hold")}


@pytest.fixture(scope="module")
def clean(render: Render, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a part of each kind, without a mistake."""
    return planting.lay(render(examples="all"), tmp_path_factory.mktemp("clean") / "project")


@pytest.fixture
def memory() -> Any:
    """A folder of a file system in memory, which lists files in the order in which they were written."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    folder = Path("/dev/shm") / f"planted-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_planted_mistakes_fit_the_project(clean: Path, tmp_path: Path) -> None:
    """There are many, in every kind of part, and what is left is Python."""
    assert len(FAULTS) >= 30
    assert {fault.header["breaks"] for fault in FAULTS} == set(VARIANTS)
    assert {Path(fault.header["config"]).stem for fault in FAULTS} == set(CONFIGS)
    for fault in [*FAULTS, *HARMLESS]:
        project = tmp_path / fault.diff.stem
        shutil.copytree(clean / "custom", project / "custom")
        file = project / fault.header["file"]
        before = file.read_text(encoding="utf-8")
        fault.plant(project)
        after = file.read_text(encoding="utf-8")
        compile(after, str(file), "exec")
        assert before != after


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(each, marks=[full] if each != "planted" else []) for each in CONFIGS])
def test_without_a_mistake_everything_holds(clean: Path, config: str) -> None:
    found = check(clean, f"configs/{config}.yaml")
    assert found.keys() >= set(VARIANTS)
    assert failed(found) == {}
    held = {name for name, text in found.items() if text == "holds"}
    assert held >= {fault.header["breaks"] for fault in FAULTS if Path(fault.header["config"]).stem == config}


@pytest.mark.slow
@pytest.mark.parametrize("fault", of_each_check())
def test_a_mistake_is_found(clean: Path, tmp_path: Path, fault: Fault) -> None:
    """By the check that it breaks; with the first step and quantity that differ."""
    project = Path(shutil.copytree(clean, tmp_path / "project"))
    fault.plant(project)
    name = fault.header["breaks"]
    found = check(project, fault.header["config"], name)[name]
    assert re.match(r"does NOT hold: (step \d+: \w|\S+ is \S+ in batches of )", found)


@full
@pytest.mark.slow
@pytest.mark.parametrize("fault", HARMLESS, ids=[fault.diff.stem for fault in HARMLESS])
def test_generators_of_data_break_nothing(clean: Path, tmp_path: Path, fault: Fault) -> None:
    """Whoever holds them, and however they are seeded: the engine seeds them for each sample."""
    project = Path(shutil.copytree(clean, tmp_path / "project"))
    fault.plant(project)
    names = ("seed", "resume", "workers")
    assert check(project, fault.header["config"], *names) == dict.fromkeys(names, "holds")


@full
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.diff.stem for fault in FAULTS])
def test_a_mistake_breaks_a_promise(clean: Path, tmp_path: Path, memory: Path, fault: Fault) -> None:
    """Seen with train.py alone: what must be the same is not."""
    project = Path(shutil.copytree(clean, tmp_path / "project"))
    fault.plant(project)
    found = planting.difference(project, fault.header["config"], fault.header["breaks"], memory)
    assert found > 10 * planting.TOLERANCE.get(fault.header["breaks"], 0.0)


@full
@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_mistake_the_promise_is_kept(
    clean: Path, tmp_path: Path, memory: Path, name: str, config: str
) -> None:
    project = Path(shutil.copytree(clean, tmp_path / "project"))
    found = planting.difference(project, f"configs/{config}.yaml", name, memory)
    assert found <= planting.TOLERANCE.get(name, 0.0)


@full
@pytest.mark.slow
@pytest.mark.parametrize("config", SAMPLES)
def test_a_sample_holds(clean: Path, config: str) -> None:
    assert failed(check(clean, f"configs/{config}.yaml")) == {}


@full
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_holds(render: Render, tmp_path: Path, name: str) -> None:
    """Each as it lies in the project; one that begins with the weights of another run gets that run first."""
    project = Path(shutil.copytree(render(examples="all"), tmp_path / "project"))
    config = f"examples/{name}/config.yaml"
    keys = yaml.safe_dump(yaml.safe_load((project / config).read_text()))  # without comments
    for other in set(re.findall(r"experiments/(\w+)/", keys)):
        base = "configs/default.yaml" if other == "default" else f"examples/{other}/config.yaml"
        short = ["--progress.epoch", "3", "--config", base]
        subprocess.run([sys.executable, "train.py", *short], cwd=project, check=True, timeout=TIMEOUT_S)
    found = check(project, config)
    assert failed(found) == {}
    assert "holds" in found.values()
