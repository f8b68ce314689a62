"""Runs of the examples by their own configs, as their users start them."""

import re
from pathlib import Path

import train
from tests.conftest import Runs, load
from tests.ranks import several


def words(runs: Runs, example: str, *more: str, name: str = "run") -> list[str]:
    """Return the command line for `examples/<example>.yaml`."""
    fixed = ["--config", f"examples/{example}.yaml", "--name", name, "--dir.runs_dir", str(runs.root)]
    return [*fixed, "--monitor.writers", "[]", *more]


def trained(runs: Runs, example: str, *more: str, name: str = "run", processes: int = 1) -> Path:
    """Train to the end; the run's folder."""
    line = words(runs, example, *more, name=name)
    if processes > 1:
        several(runs, processes, line)
    else:
        assert train.main(line) == 0
    return runs.root / name


def distance(first: Path, second: Path) -> float:
    """Return the largest difference between two weights of the last checkpoints of two runs."""
    weights, others = load(first)["model"], load(second)["model"]
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def shown(folder: Path, name: str) -> list[str]:
    """Return the texts that a task has shown in the log under this name, without line ends."""
    text = (folder / "train.log").read_text()
    found = re.findall(rf" {name}:\n(.*?)\n(?=20\d\d-|\d\d:\d\d:)", text, flags=re.DOTALL)
    return [each.replace("\n", "") for each in found]
