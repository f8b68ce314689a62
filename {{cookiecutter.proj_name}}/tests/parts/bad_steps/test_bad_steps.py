"""`optim.bad_steps`: a step whose loss or gradient is not finite is left out, alike on all processes."""

from typing import Any

import pytest
import torch

from common.trainer import Trainer
from tests.conftest import Runs, load, metrics, same
from tests.small import NoisyDigits

# Of steps 4 and 10: not a number, and so is every loss and running statistic of a batch that has it.
BAD = 10
DATA = ["--dataset.train", f"{{type: {__name__}.Poisoned}}"]
SKIP, REWIND = (["--optim.bad_steps.action", action] for action in ("skip", "rewind"))


class Poisoned(NoisyDigits):
    """Digits of which one is damaged."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"] * float("nan")} if index == BAD else sample


states: list[dict[str, Any]] = []


def remember(trainer: Trainer) -> None:
    """A plug-in: everything that a step changes, before the first step and after each."""
    states.clear()

    def copy() -> None:
        parts = (trainer.task, trainer.optimizer)
        state: Any = {type(part).__name__: part.state_dict() for part in parts}
        state["last"] = getattr(trainer.optimizer_step.guard, "last", {})
        torch.save(state, path := trainer.paths.root / "state.pt")
        states.append(torch.load(path, weights_only=True))

    copy()
    trainer.monitor.after_step.append(copy)


ACCUMULATED = ["--batch_size", "16", "--optim.accumulate", "2"]


@pytest.mark.parametrize("words", [[], ["--precision.mode", "fp16"], ["--optim.clip_gradients", "1"], ACCUMULATED])
def test_a_skipped_step_changes_nothing(runs: Runs, words: list[str]) -> None:
    """Not the weights, the optimizer, nor a running statistic; the record has its samples."""
    words = [*words, "--optim.bad_steps.limit", "1"]  # in a row
    folder = runs.train(*DATA, *SKIP, *words, "--plugins", f"[{__name__}:remember]")
    skipped = metrics(folder, "skipped")
    assert [(entry["step"] - 1) // 5 for entry in skipped] == [0, 1]  # epochs
    for entry in skipped:
        assert len(entry["samples"]) == 32 and BAD in entry["samples"] and entry["first"] == entry["step"]
    steps = {entry["step"] for entry in skipped}
    assert {step for step in range(1, 11) if same(states[step], states[step - 1])} == steps
    text = (folder / "train.log").read_text()
    assert text.count("is skipped: its loss is nan, of train samples") == 2 and "(32 in all)" in text
    assert all(value.isfinite().all() for value in load(folder)["model"].values())
    assert len(metrics(folder, "train")) == 5
