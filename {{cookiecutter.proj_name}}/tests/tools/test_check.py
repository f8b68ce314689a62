"""python -m tools.check: the guarantees on the owner's own code, and where the cause is if one does not hold."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.conftest import CONFIG, ENVIRONMENT, PROJECT, Runs
from tests.parts import NoisyDigits
from tools.check import __main__ as tool
from tools.check import causes

# What to check: make check CONFIG="configs/one.yaml configs/two.yaml"
CONFIGS = os.environ.get("CHECK_CONFIG", "configs/default.yaml").split()


class Counting(NoisyDigits):
    """A mistake: the samples become darker with each one that is read, and no checkpoint holds how many were."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.read = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        self.read += 1  # the line to find
        return {**item, "image": item["image"] / (1 + self.read / 1000)}


HERE = "tests/tools/test_check.py"
LINE = 1 + (PROJECT / HERE).read_text().splitlines().index("        self.read += 1  # the line to find")
COUNTING = ["--dataset.train", "{type: tests.tools.test_check.Counting}"]


@pytest.mark.slow
@pytest.mark.check
@pytest.mark.parametrize("config", CONFIGS)
def test_the_guarantees_hold(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--config", config]) == 0, capsys.readouterr().out


def test_what_changes_is_found_with_its_line(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run notes the attribute that changes; the notes and the difference that was seen lead to the line."""
    file = runs.root / "notes.jsonl"
    monkeypatch.setenv("CHECK_WATCH", str(file))
    runs.train(*COUNTING, "--plugins", "[tools.check.watch.attach]", "--progress.max_steps", "3")
    notes = [json.loads(line) for line in file.read_text().splitlines()]
    changed = {(note["file"], note["name"], note["attribute"]) for note in notes if note["kind"] == "change"}
    assert (HERE, "Counting", "read") in changed
    first, *_ = causes.suspects("resume", "input", "model[0]", notes)
    assert (first.file, first.line) == (HERE, LINE)
    assert str(first).startswith(
        f"{HERE}:{LINE}: `Counting.read` changes from step to step, and no checkpoint holds it; "
    )


DATA = """
import os, random, time

class Pictures:
    def __init__(self, root):
        self.files = {files}
        self.seen = None

    def __getitem__(self, index):
        return self.files[index], {value}
"""


@pytest.mark.parametrize(
    ("check", "line", "replaced"),
    [
        ("seed", 6, {"files": "os.listdir(root)"}),
        ("seed", 10, {"value": "time.time()"}),
        ("seed", 10, {"value": "hash(str(index))"}),
        ("seed", 10, {"value": "random.Random().random()"}),
        ("workers", 10, {"value": "torch.utils.data.get_worker_info().id"}),
        ("processes", 10, {"value": "os.environ['RANK']"}),
        ("accumulate", 10, {"value": "index.mean(0)"}),
        ("kill", 10, {"value": "open(root, 'w').write('1')"}),
    ],
    ids=str,
)
def test_doubtful_lines(tmp_path: Path, check: str, line: int, replaced: dict[str, str]) -> None:
    """Without anything that a run noted, the code of the part that makes what differs first is searched."""
    file = tmp_path / "pictures.py"
    file.write_text(DATA.format(**{"files": "sorted(os.listdir(root))", "value": "index", **replaced}))
    notes: list[dict[str, Any]] = [
        {"kind": "module", "file": str(file)},
        {"kind": "part", "role": "data", "name": "Pictures", "file": str(file)},
    ]
    found = causes.suspects(check, "input", "model[0]", notes)
    assert [suspect.line for suspect in found] == [line]


def test_without_a_finding_the_part_itself_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pictures.py"
    file.write_text(DATA.format(files="sorted(os.listdir(root))", value="index"))
    notes = [
        {"kind": "module", "file": str(file)},
        {"kind": "part", "role": "data", "name": "Pictures", "file": str(file)},
    ]
    (only,) = causes.suspects("seed", "input", "model[0]", notes)
    assert str(only) == f"{file}:4: Pictures makes model[0]"


@pytest.mark.slow
def test_by_the_command_line(tmp_path: Path) -> None:
    """The first tensor that differs, where the cause is, and the exit code."""
    words = ["--config", str(CONFIG), *COUNTING, "--only", "resume", "seed", "--json"]
    command = [sys.executable, "-m", "tools.check", *words]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert found["seed"]["outcome"] == "holds"
    assert found["resume"]["outcome"] == "fails"
    assert (found["resume"]["step"], found["resume"]["tensor"]) == (3, "input model[0]")
    assert found["resume"]["suspects"][0]["file"] == HERE
    assert found["resume"]["suspects"][0]["line"] == LINE


def test_a_config_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tools.check", "--config", str(CONFIG), "--optim.lr", "-1"]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "optim.lr" in done.stderr and "Traceback" not in done.stderr
