"""Runs of the examples by their own configs, as their users start them."""

import re
from pathlib import Path
from typing import Any

import torch

import train
from tests.conftest import Runs, load, same
from tests.ranks import several


def words(runs: Runs, example: str, *more: str, name: str = "run") -> list[str]:
    """The command line for `examples/<example>.yaml`."""
    fixed = ["--config", f"examples/{example}.yaml", "--name", name, "--dir.expr_dir", str(runs.root)]
    return [*fixed, "--monitor.tensorboard", "false", *more]


def trained(runs: Runs, example: str, *more: str, name: str = "run", processes: int = 1) -> Path:
    """Train to the end; the run's folder."""
    line = words(runs, example, *more, name=name)
    if processes > 1:
        several(runs, processes, line)
    else:
        assert train.main(line) == 0
    return runs.root / name


def is_resumed_exactly(runs: Runs, example: str, *more: str, steps: int, cut: int, processes: int = 1) -> None:
    """A run that ends after `cut` steps and is resumed to `steps` ends like one that takes `steps` at once.

    The schedule must not depend on the length of the run.
    """
    last = ["--progress.epoch", "null", "--progress.max_steps"]
    whole = trained(runs, example, *more, *last, str(steps), name="whole", processes=processes)
    trained(runs, example, *more, *last, str(cut), name="cut", processes=processes)
    trained(runs, example, *more, *last, str(steps), "--resume", "auto", name="cut", processes=processes)
    first, second = load(whole), load(runs.root / "cut")
    assert first["position"] == second["position"]
    assert [part for part in first if part != "about" and not same(first[part], second[part])] == []


def distance(first: Path, second: Path) -> float:
    """The largest difference between two weights of the last checkpoints of two runs."""
    weights, others = load(first)["model"], load(second)["model"]
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def shown(folder: Path, name: str) -> list[str]:
    """The texts that a task has shown in the log under this name, without line ends."""
    text = (folder / "train.log").read_text()
    found = re.findall(rf" {name}:\n(.*?)\n(?=20\d\d-|\d\d:\d\d:)", text, flags=re.DOTALL)
    return [each.replace("\n", "") for each in found]


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]
