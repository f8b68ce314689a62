"""auto_batch: the largest micro-batch that fits, with the samples of a step as they were, to the bit."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from common.build import fit_batch
from common.distributed.seed import random_state
from tests.conftest import ErrorOf, Runs, load, same
from tests.parts import Tower
from tests.ranks import start_ranks
from tests.resume import cut, differing, final, words
from tests.samples import Digits


class Hungry(Tower):
    """Its training takes more memory than there is for larger batches than the environment says for this rank."""

    def forward(self, image: Tensor) -> Tensor:
        limits = os.environ["FITS"].split()
        if self.training and len(image) > int(limits[int(os.environ.get("RANK", "0"))]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(image)


class Stream:
    """Data that can only be read in order."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Digits(data_dir, mode)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.digits[index] for index in range(64))


HUNGRY = ["--model", "{type: engine.run.test_auto_batch.Hungry, batch: true}"]
AUTO = [*HUNGRY, "--auto_batch", "true"]


def sizes(runs: Runs, name: str) -> tuple[int, int]:
    """Return what the run has on record, which the log says too."""
    config = yaml.safe_load((runs.root / name / "config.yaml").read_text())
    size, accumulate = config["batch_size"], config["optim"]["accumulate"]
    said = f"auto_batch: {size} samples per micro-batch, {accumulate} micro-batch(es) per step"
    assert (said in (runs.root / name / "train.log").read_text()) is config["auto_batch"]
    return size, accumulate


@pytest.mark.parametrize(
    ("batch", "fits", "chosen"),
    [((32, 1), "32", (32, 1)), ((32, 2), "11", (8, 8)), ((12, 2), "5", (4, 6)), ((5, 2), "2", (2, 5))],
)
def test_it_trains_as_with_the_chosen_size(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, batch: tuple[int, int], fits: str, chosen: tuple[int, int]
) -> None:
    """With dropout, batch norm and augmentation: all bits, numbers and random states are those of a run without it."""
    monkeypatch.setenv("FITS", fits)
    steps = ["--debug.max_samples", str(3 * batch[0] * batch[1]), "--progress.epoch", "1", "--progress.epoch_val", "1"]
    for name, (size, accumulate), more in (("auto", batch, AUTO), ("chosen", chosen, HUNGRY)):
        more = [*more, *steps, "--batch_size", str(size), "--optim.accumulate", str(accumulate)]
        runs.train(*words("plain", *more), name=name)
    assert sizes(runs, "auto") == sizes(runs, "chosen") == chosen
    auto, plain = (final(runs.root / name) for name in ("auto", "chosen"))
    assert differing(auto, plain) == []


def test_a_resume_keeps_it(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first words, and where more would fit; a run that was never cut ends alike."""
    more = [*AUTO, "--batch_size", "32"]
    monkeypatch.setenv("FITS", "8")
    runs.train(*words("plain", *more), name="uncut")
    cut(runs, "plain", 24, *more)
    monkeypatch.setenv("FITS", "32")
    runs.train(*words("plain", *more, "--resume", "auto"), name="cut")
    assert sizes(runs, "cut") == (8, 4)
    assert differing(final(runs.root / "uncut"), final(runs.root / "cut")) == []
    assert "this resume is bit-exact" in (runs.root / "cut" / "train.log").read_text()


def test_a_trial_draws_nothing_from_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws before training begins, such as a plugin, draws the same."""
    monkeypatch.setenv("FITS", "32")
    states: list[Any] = []

    def noted(*arguments: Any) -> Any:
        states.append(random_state(torch.device("cpu")))
        fitted = fit_batch(*arguments)
        states.append(random_state(torch.device("cpu")))
        return fitted

    monkeypatch.setattr("train.fit_batch", noted)
    runs.train(*AUTO, "--batch_size", "32", "--progress.epoch", "1")
    assert same(states[0], states[1])


@pytest.mark.slow
def test_the_ranks_agree(runs: Runs) -> None:
    """The one with the least room decides, and none waits for another."""
    ended = start_ranks(runs.root, 2, runs.words(*AUTO, "--batch_size", "16"), environment={"FITS": "16 4"})
    assert ended.codes == [0, 0], "\n".join(ended.texts)
    assert sizes(runs, "run") == (4, 4)
    assert load(runs.root / "run")["fingerprint"]["samples per step"] == 32


@pytest.mark.parametrize("more", ["--dist.strategy fsdp", "--dist.reduction fixed", "--dist.sync_bn true"])
def test_what_it_does_not_go_with(error_of: ErrorOf, more: str) -> None:
    """Processes that exchange within a forward pass would wait for one that has run out of memory."""
    assert "does not work with dist.strategy fsdp, dist.sync_bn" in error_of("--auto_batch", "true", *more.split())


def test_data_in_order_is_refused(error_of: ErrorOf) -> None:
    said = error_of("--auto_batch", "true", "--dataset.train", "{type: engine.run.test_auto_batch.Stream}")
    assert "auto_batch needs a dataset with __len__ and __getitem__" in said


def test_other_errors_are_those_of_the_first_step(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the model, and a single sample that does not fit, are reported with the step and the samples."""
    monkeypatch.setenv("FITS", "0")
    assert runs.fail(*AUTO) == 1
    assert "out of memory" in capsys.readouterr().err
    monkeypatch.setenv("FITS", "none")
    assert runs.fail(*AUTO) == 1
    said = capsys.readouterr().err
    assert "invalid literal for int" in said
    assert "during   training step 1" in said
