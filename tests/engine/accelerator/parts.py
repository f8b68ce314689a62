"""Plugins and parts for runs on an emulated accelerator, named by their import path."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from common.trainer import Trainer
from parts.pictures import around
from custom.datasets.digits_dataset import DigitsDataset


def kill(trainer: Trainer) -> None:
    """Kill the process after the step that the environment names."""
    at = int(os.environ.get("KILL_AFTER", "0"))

    def after_step() -> None:
        if trainer.at.step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.monitor.after_step.append(after_step)


def mark_waits(trainer: Trainer) -> None:
    """Write into the file of waits when the loop enters and leaves what may wait."""
    for name in ("log", "evaluate", "save", "finish"):
        setattr(trainer, name, _marked(getattr(trainer, name), name))
    around.draw_training = _marked(around.draw_training, "pictures")


def _marked(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        _note(name)
        try:
            return method(*arguments, **named)
        finally:
            _note("steps")

    return call


def _note(part: str) -> None:
    with open(f"{os.environ['EMU_WAITS']}.{os.getpid()}", "a") as file:
        file.write(f"now in\t{part}\n")


class WrongLabel(DigitsDataset):
    """Sample 7 has a label that is no class."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index == 7:
            sample["label"] = torch.full_like(torch.as_tensor(sample["label"]), 99)
        return sample


def no_boxes(output: Any, batch: Any) -> torch.Tensor:
    """A loss of a batch in which nothing counts: a constant, which torch makes on the CPU."""
    return torch.tensor(0.0)
