"""Records that depend on the weights: read in step with the training, or refused."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.base.errors import UserError
from common.trainer import Trainer
from tests.conftest import Runs, load, metrics
from tests.ranks import refused, several
from tests.resume import differing, final, same_after_cut, words
from custom.datasets.digits_dataset import DigitsDataset
from custom.tasks.classification_task import ClassificationTask

RECORDS = 70


class Ahead:
    """Digits, of which each is chosen by what the model takes the one before for."""

    policy: Any = None

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits, self.at = DigitsDataset(data_dir, mode), 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            with torch.no_grad():
                image = self.digits[self.at]["image"][None]
                logits = self.policy(image.to(next(self.policy.parameters())))
            self.at = (self.at + 1 + int(logits.softmax(1).multinomial(1))) % len(self.digits)
            yield {**self.digits[self.at], "made_by": made_by(self.policy)}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class InStep(Ahead):
    """The same, in step."""

    reads_in_step = True

    def __len__(self) -> int:
        return RECORDS


class Shared(InStep):
    """Each process reads records of its own; the last process has none left after 20, if it is `uneven`."""

    def __init__(self, data_dir: Path, mode: str, uneven: bool = False) -> None:
        super().__init__(data_dir, mode)
        self.limit = 20 if uneven else RECORDS

    def share(self, reader: int, readers: int) -> None:
        self.at, self.limit = 100 * reader, self.limit if reader == readers - 1 else RECORDS

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return islice(super().__iter__(), self.limit)


class Short(InStep):
    """Gives fewer records than it says."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return islice(super().__iter__(), 40)


class Pass(InStep):
    """Goes through its records once, and begins again only when it is asked for more."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.done = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        records = super().__iter__()
        while self.done < RECORDS:
            self.done += 1
            yield next(records)
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.done = state["at"], state["done"]


class Endless(InStep):
    """Does not say how many records an epoch has."""

    __len__ = None  # type: ignore[assignment]


class Indexed(DigitsDataset):
    """Read by number, with the model at hand."""

    policy: Any = None


def made_by(model: nn.Module) -> Tensor:
    return torch.stack([each.detach().double().sum() for each in model.parameters()]).sum()


class Fresh(ClassificationTask):
    """Wants records of the present weights."""

    def update(self, name: str, batch: dict[str, Any]) -> dict[str, Tensor]:
        assert torch.equal(batch["made_by"], made_by(self.model).expand(len(batch["label"])))
        return super().update(name, batch)


def hand_over(trainer: Trainer) -> None:
    """A plugin: the dataset gets the model."""
    trainer.stream.dataset.policy = trainer.task.model


def line(name: str, *more: str, plugin: str = "hand_over", samples: int = 0) -> list[str]:
    fixed = ["--dataset.train", f"{{type: {__name__}.{name}}}", "--plugins", f"[{__name__}:{plugin}]"]
    return words("plain", *fixed, "--model", "{type: tests.small.Plain}", "--debug.max_samples", str(samples), *more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["InStep", "Pass"])
@pytest.mark.parametrize("at", [4, 6])
def test_records_of_the_present_weights(runs: Runs, name: str, at: int) -> None:
    """Those of a step are made after the step before it, and made again after a resume; 70 in steps of 32, 32 and 6."""
    more = ["--task", f"{{type: {__name__}.Fresh}}", "--progress.epoch", "3", "--batch_size", "16"]
    more += ["--optim.accumulate", "2", "--progress.epoch_val", "1"]
    uncut, _ = same_after_cut(runs, "plain", *line(name, *more), at=2 * at)
    assert load(uncut)["position"] == {"step": 9, "epoch": 3, "sample": 0, "epoch_size": RECORDS}
    assert [row["step"] for row in metrics(uncut, "val")] == [3, 6, 9]


@pytest.mark.slow
def test_two_processes_read_in_step(runs: Runs) -> None:
    """The plugin runs after the processes are set up, and the trial batch after the plugin; a schedule by epochs."""
    more = ["--task", f"{{type: {__name__}.Fresh}}", "--precision.mode", "fp64", "--optim.lr_scheduler.type", "cosine"]
    more += ["--loader.drop_last", "true"]
    one = load(runs.train(*line("InStep", *more, "--batch_size", "32"), name="one"))
    several(runs, 2, runs.words(*line("InStep", *more, "--batch_size", "16"), name="two"))
    two = load(runs.root / "two")
    assert one["position"] == two["position"] == {"step": 4, "epoch": 2, "sample": 0, "epoch_size": RECORDS}
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_each_process_reads_its_share_in_step(runs: Runs) -> None:
    """70 records of two processes, 35 each, in batches of 8; resumed inside the second epoch."""
    more = line("Shared", "--task", f"{{type: {__name__}.Fresh}}", "--batch_size", "8")
    several(runs, 2, runs.words(*more, name="uncut"))
    assert load(runs.root / "uncut")["position"] == {"step": 10, "epoch": 2, "sample": 0, "epoch_size": RECORDS}
    several(runs, 2, runs.words(*more, name="cut"), at=2 + 8)  # the first two calls try the model
    several(runs, 2, runs.words(*more, "--resume", "auto", name="cut"))
    assert differing(final(runs.root / "uncut"), final(runs.root / "cut")) == []
    more[more.index("--dataset.train") + 1] = f"{{type: {__name__}.Shared, uneven: true}}"
    assert "must yield all of its __len__" in refused(runs, 2, runs.words(*more, name="uneven"))


@pytest.mark.parametrize(
    ("name", "worker", "plugin", "message"),
    [
        ("InStep", "2", "hand_over", "num_workers: 2, but InStep is read in step with training: use --num_w"),
        ("Endless", "0", "hand_over", "Endless has reads_in_step, so needs __len__"),
        ("Short", "0", "hand_over", "Short has reads_in_step, but ended after 64 records of 70"),
    ],
)
def test_what_is_refused(runs: Runs, name: str, worker: str, plugin: str, message: str) -> None:
    """With the attribute and the remedies; whatever can be known before the first step, before it."""
    try:
        assert runs.fail(*line(name, "--num_workers", worker, plugin=plugin)) == 2
        log = (runs.root / "run" / "train.log").read_text()
    except UserError as error:
        log = str(error)
    assert message in log
    assert name == "Short" or "step 1," not in log


def test_data_by_number_are_read_in_step_anyway(runs: Runs) -> None:
    """Without workers, a sample is read when its step begins."""
    runs.train(*line("Indexed", "--progress.epoch", "1", samples=64))
