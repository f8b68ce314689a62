"""Runs of the examples by their own configs, as their users start them."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import train
from common.trainer import Trainer
from tests.conftest import Runs, load, same
from tests.ranks import several, start_ranks


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


def is_resumed_exactly(runs: Runs, example: str, *more: str, steps: int, stop: int, processes: int = 1) -> None:
    """A run that a signal stops after `stop` steps, and that is resumed, ends as one that was never stopped."""
    line = [*more, "--progress.epoch", "null", "--progress.max_steps", str(steps)]
    line += ["--plugins", "[tests.examples.runs:stop_by_signal]"]
    whole = trained(runs, example, *line, name="whole", processes=processes)
    stopped = words(runs, example, *line, name="stopped")
    if processes > 1:
        ended = start_ranks(runs.root, processes, stopped, environment={"STOP_AT": str(stop)})
        assert set(ended.codes) == {128 + signal.SIGTERM}, "\n".join(ended.texts)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STOP_AT", str(stop))
            assert train.main(stopped) == 128 + signal.SIGTERM
    assert stop <= load(runs.root / "stopped")["position"]["step"] < steps
    folder = trained(runs, example, *line, "--resume", "auto", name="stopped", processes=processes)
    first, second = load(whole), load(folder)
    assert {part: first[part] for part in first if part != "about" and not same(first[part], second[part])} == {}


def stop_by_signal(trainer: Trainer) -> None:
    """A plugin: the signal of a scheduler arrives in the step that the environment names."""

    stop = int(os.environ.get("STOP_AT", "0"))

    def send(*_: Any) -> None:
        if not trainer.rank.is_alone:
            time.sleep(0.25)  # processes ask each other every 0.2 s whether to stop
        if trainer.at.step + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    if stop:
        trainer.optimizer.register_step_post_hook(send)


def distance(first: Path, second: Path) -> float:
    """The largest difference between two weights of the last checkpoints of two runs."""
    weights, others = load(first)["model"], load(second)["model"]
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def shown(folder: Path, name: str) -> list[str]:
    """The texts that a task has shown in the log under this name, without line ends."""
    text = (folder / "train.log").read_text()
    found = re.findall(rf" {name}:\n(.*?)\n(?=20\d\d-|\d\d:\d\d:)", text, flags=re.DOTALL)
    return [each.replace("\n", "") for each in found]
