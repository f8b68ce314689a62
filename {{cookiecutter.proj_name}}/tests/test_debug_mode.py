"""What --debug lays over a config: one process that does one thing at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from common import distributed
from common.distributed import DistConfig
from tests.conftest import CONFIG, Runs

BUSY = "gpu_ids: [0, 1]\ndist: {processes: 2}\nworker: 2\ncheckpoint: {background: true}\n"


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """A config for two processes, with workers and background saves."""
    path = tmp_path / "busy.yaml"
    path.write_text(f"$BASE: {CONFIG}\n{BUSY}")
    return path


def test_one_process_and_nothing_beside_it(runs: Runs, busy: Path) -> None:
    """R-03: one process, on the CPU, no workers, no background saves, whatever the config says."""
    assert train.main(["--config", str(busy), "--debug", "--dir.expr_dir", str(runs.root)]) == 0
    folder = runs.root / "debug"
    assert json.loads((folder / "run.json").read_text())["attempts"][0]["world_size"] == 1
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert (values["worker"], values["checkpoint"]["background"], values["gpu_ids"]) == (0, False, -1)


def test_the_command_line_wins(monkeypatch: pytest.MonkeyPatch, busy: Path) -> None:
    """R-03: who asks for two processes in the same breath gets them."""
    asked: list[Any] = []

    def spawn(gpu_ids: Any, config: DistConfig, argv: list[str]) -> int:
        asked.append((gpu_ids, config.processes))
        return 7

    monkeypatch.setattr(distributed, "spawn", spawn)
    assert train.main(["--config", str(busy), "--debug", "--dist.processes", "2"]) == 7
    assert train.main(["--config", str(busy), "--debug", "--gpu_ids", "0,1"]) == 7
    assert asked == [(-1, 2), ([0, 1], None)]
