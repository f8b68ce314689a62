"""Evaluation: each sample once, and the same number to the last digit however the work is divided."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.base.errors import UserError, error_context, with_notes
from common.config import resolve
from common.distributed import Rank
from common.distributed.group import code_of
from common.evaluation.loss import LossSums
from common.evaluation.metric import GatheredMetric, MetricFactory, Results
import evaluate
from cli.program import EvalConfig
from cli.trained import load_trained
from tests.conftest import CONFIG, Runs, metrics
from tests.data.test_data import evaluation_shares
from tests.evaluation.test_evaluation import NAMED, Numbered, digits
from tests.ranks import failed, start_ranks
from tests.samples import Digits
from custom.config import Config
from custom.datasets.digits_dataset import DigitsDataset

HERE = "engine.evaluation.test_evaluation"


class BrokenAt(Numbered):
    """One that cannot give a certain sample."""

    def __init__(self, data_dir: Path, mode: str, count: int, at: int, clear: bool = False) -> None:
        super().__init__(data_dir, mode, count)
        self.at, self.clear = at, clear

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.at:
            raise UserError("this file is broken") if self.clear else ZeroDivisionError("by nothing")
        return super().__getitem__(index)


class NeverBuilt:
    """Training data that must not be touched."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        raise AssertionError("the training data were built")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


def test_shares_are_whole_batches() -> None:
    """Dealt out in turn, so that shares differ by one batch at most; each sample once, no padding."""
    for world in (1, 2, 3, 8):
        shares = evaluation_shares(23, 4, world)
        whole = sorted(batch for share in shares for batch in share)
        assert whole == [list(range(first, min(first + 4, 23))) for first in range(0, 23, 4)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([0.1, 0.2, 0.3, -0.6], math.fsum([0.1, 0.2, 0.3, -0.6]) / 4),  # not 0, whatever the order
        ([1.0, math.inf], math.inf),
        ([math.nan, 1.0], math.nan),
    ],
)
def test_mean_losses(values: list[float], mean: float) -> None:
    """Rounded once, whatever the order; an infinite loss ends no evaluation."""
    for _ in range(3):
        random.Random(3).shuffle(values)
        sums = LossSums()
        for value in values:
            sums.add({"loss": torch.tensor(value, dtype=torch.float64)}, 1, 1)
        assert sums.means(Rank())[0]["loss"] == pytest.approx(mean, rel=0, abs=0, nan_ok=True)


def test_a_loss_of_some_batches_only() -> None:
    """Is averaged over these, as in the log of training."""
    sums = LossSums()
    sums.add({"loss": torch.tensor(1.0), "rare": torch.tensor(3.0)}, 1, 1)
    sums.add({"loss": torch.tensor(3.0)}, 3, 3)
    assert sums.means(Rank()) == ({"loss": 2.5, "rare": 3.0}, 4)
    sums = LossSums()
    sums.add({"loss": torch.tensor(math.nan)}, 3, 0)
    assert math.isnan(sums.means(Rank())[0]["loss"])  # 0 would be the best


def test_losses_are_read_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches leave their losses on the device until the end."""
    reads: list[int] = []
    original = Tensor.tolist

    def tolist(self: Tensor) -> Any:
        reads.append(self.numel())
        return original(self)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    sums = LossSums()
    for batch in range(400):
        sums.add({"loss": torch.tensor(float(batch)), "ce": torch.tensor(1.0)}, 1 + batch % 2, 1 + batch % 2)
    assert reads == []
    means, samples = sums.means(Rank())
    assert (samples, means["ce"], reads) == (600, 1.0, [800])
    assert means["loss"] == sum(batch * (1 + batch % 2) for batch in range(400)) / 600


class Neither:
    """No metric."""


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"metric\.mine: Neither derives from neither Metric nor GatheredMetric"):
        MetricFactory({"mine": {"type": f"{HERE}.Neither"}})


@pytest.mark.slow
@pytest.mark.parametrize("clear", [False, True])
def test_an_error_on_one_rank_says_where(runs: Runs, clear: bool) -> None:
    """The set, the batch and its samples, in the log of that rank; the others do not wait for ever."""
    broken = f"{{type: {HERE}.BrokenAt, count: 43, at: 37, eval_batch_size: 7, clear: {str(clear).lower()}}}"
    words = ["--dataset.val", f"{{$REPLACE: true, first: {digits(5, 8)}, second: {broken}}}", "--progress.epoch", "1"]
    argv = runs.words(*words, "--best.metric", "first.loss", "--debug.max_samples", "0")
    ended = failed(start_ranks(runs.root, 2, argv))
    assert ended.codes == [1, 2 if clear else 1]
    log = (runs.root / "run" / "train.log").read_text()  # rank 0 tells it
    assert "in the evaluation on val.second, samples 35 to 41" in log
    assert (
        "this file is broken" if clear else "sample 37 of BrokenAt cannot be read: ZeroDivisionError: by nothing"
    ) in log
    assert ("Traceback" in log) is not clear


def test_notes() -> None:
    """An error keeps its type and text, and gets a note of each place around it; the inner one first."""
    with pytest.raises(KeyError) as caught, error_context("in the house"), error_context("in the room"):
        raise KeyError("lamp")
    assert vars(caught.value)["__notes__"] == ["in the room", "in the house"]
    assert with_notes(caught.value) == "'lamp'\n  in the room\n  in the house"
    assert with_notes(ValueError("plain")) == "plain"


def test_an_error_after_the_last_batch(runs: Runs) -> None:
    """A metric that breaks when it is computed is not blamed on a sample."""
    assert runs.fail("--metric", f"{{broken: {{type: {HERE}.BrokenMetric}}}}") == 1
    where = "in the evaluation on val, after the last batch"
    assert where in (runs.root / "run" / "train.log").read_text()
    assert where in json.loads((runs.root / "run" / "status.json").read_text())["reason"]


class BrokenMetric(GatheredMetric):
    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        return {"label": batch["label"]}

    def compute(self, results: Results) -> float:
        raise ZeroDivisionError


@pytest.fixture
def named(tmp_path: Path) -> str:
    """A config with named sets."""
    file = tmp_path / "named.yaml"
    file.write_text(NAMED.format(base=CONFIG))
    return str(file)


def test_named_sets_on_the_command_line(runs: Runs, named: str) -> None:
    """Whole, by one key of one set, and a set of the base left out."""
    folder = runs.train(
        "--dataset.eval", "{$REPLACE: true, a: {type: DigitsDataset}, b-2: {type: DigitsDataset, shift: 1}}",
        "--progress.epoch_eval", "1", "--progress.epoch", "1",
    )  # fmt: skip
    assert metrics(folder, "eval")[-1]["samples"] == {"a": 160, "b-2": 160}
    resolved = resolve(EvalConfig, [named], ["--dataset.eval.clean.eval_batch_size", "64"])
    assert resolved.config.dataset.eval == {
        "clean": {"type": "tests.samples.Digits", "eval_batch_size": 64},
        "shifted": {"type": "tests.samples.Digits", "shift": 2},
    }
    words = ["--dataset.val.shifted", "null", "--dataset.eval", "null", "--progress.epoch", "1"]
    folder = runs.train("--config", named, *words, name="less")
    assert list(metrics(folder, "val")[-1]["values"]) == ["clean.loss", "clean.CrossEntropyLoss", "clean.Accuracy"]


@pytest.mark.parametrize(
    ("option", "value", "key", "text"),
    [
        ("--dataset.eval.more", "{typ: DigitsDataset}", "dataset.eval.more.type", "must name a dataset; one of "),
        ("--dataset.eval.clean.type", "DigitDataset", "dataset.eval.clean.type = 'DigitDataset'",
         "did you mean DigitsDataset?"),
        ("--dataset.eval.clean.shft", "2", "dataset.eval.clean.shft = 2", "did you mean shift?"),
        ("--dataset.eval.clean.eval_batchsize", "2", "dataset.eval.clean.eval_batchsize = 2",
         "did you mean eval_batch_size?"),
        ("--dataset.eval.clean.eval_batch_size", "0", "dataset.eval.clean.eval_batch_size = 0", "at least 1"),
        ("--dataset.eval.clean.shift", "far", "dataset.eval.clean.shift = 'far'", "must be a valid integer"),
        ("--dataset.eval.clean", "Digits", "dataset.eval.clean = 'Digits'", "must be a section"),
        ("--dataset.eval", "{a/b: {type: DigitsDataset}}", "dataset.eval.a/b", "only letters, digits, _ and -"),
        ("--dataset.eval", "{a.b: {type: DigitsDataset}}", "dataset.eval.a.b", "only letters, digits, _ and -"),
        ("--dataset.eval.eval_batch_size", "64", "dataset.eval.eval_batch_size = 64", "must be a section"),
        ("--dataset.train", "{$REPLACE: true, a: {shift: 1}}", "dataset.train.type", "must name a dataset"),
        ("--best.metric", "clean.Acuracy", "best.metric = 'clean.Acuracy'", "did you mean clean.Accuracy?"),
        ("--best.metric", "cleen.loss", "best.metric = 'cleen.loss'", "did you mean clean.loss?"),
        ("--best.metric", "loss", "best.metric = 'loss'", "there is: clean.loss, clean.Cross"),
    ],
)  # fmt: skip
def test_mistakes_in_named_sets(named: str, option: str, value: str, key: str, text: str) -> None:
    """Each is reported with its whole key, and with what to do."""
    with pytest.raises(UserError) as caught:
        resolve(Config, [named], [option, value])
    message = str(caught.value)
    assert "1 problem:" in message
    assert f"  {key}  (" in message
    assert text in message


def test_a_named_set_that_inherits_a_type(tmp_path: Path) -> None:
    """Merged with a base's single set, named ones are refused, with the line."""
    text = "$BASE: {}\ndataset:\n  eval:\n    clean: {{type: DigitsDataset}}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(text.format(CONFIG))
    with pytest.raises(UserError) as caught:
        resolve(Config, [file])
    message = str(caught.value)
    assert "  dataset.eval.clean  (" in message and "mine.yaml:4" in message
    assert "is not an argument of DigitsDataset" in message


def test_classes_of_each_set_are_checked(runs: Runs, named: str) -> None:
    """As those of a single one."""
    with pytest.raises(UserError, match=r"model\.classes is 9, but dataset\.train has 10"):
        runs.train("--config", named, "--model.classes", "9")
    other = f"{{type: {HERE}.Letters}}"
    with pytest.raises(UserError, match=r"dataset\.eval\.letters has the classes a, b"):
        runs.train("--config", named, "--dataset.eval.letters", other)
    missing = "{type: ImageFolderDataset, folder: nowhere}"
    with pytest.raises(UserError, match=r"there is no folder") as caught:
        runs.train("--config", named, "--dataset.eval.more", missing)
    assert "in building dataset.eval.more" in with_notes(caught.value)


def test_classes_are_those_of_the_training(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """In an evaluation on other data, too, where label 1 may mean something else."""
    best = runs.train() / "checkpoints" / "best.pt"
    with pytest.raises(UserError, match=r"dataset\.eval has the classes a, b.*, but dataset\.train has 0, 1"):
        evaluated(best, "--dataset.eval.type", f"{HERE}.Letters")
    assert evaluated(best, "--dataset.eval.type", "tests.samples.Digits")["values"]["Accuracy"] > 0


def test_channels_last_in_evaluation(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """The weights have the layout of the training, on which the last bits of a convolution depend."""
    folder = runs.train("--prepare.channels_last", "true")
    trained = metrics(folder, "val")[-1]["values"]
    assert evaluated(folder / "checkpoints" / "latest.pt", "--split", "val")["values"] == trained
    weights = [p for p in load_trained(folder).task.parameters() if p.ndim == 4]
    assert weights and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def test_a_stream_cannot_be_evaluated_on(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """Also where it is the training data."""
    best = runs.train() / "checkpoints" / "best.pt"
    stream = "{type: tests.parts.streams.test_streams.Stream}"
    with pytest.raises(UserError, match=r"dataset\.train: Stream needs __len__ and __getitem__"):
        evaluated(best, "--split", "train", "--dataset.train", stream)


class Letters(DigitsDataset):
    """Digits that are called by letters."""

    classes = tuple("abcdefghij")


def test_evaluation_reads_its_data_again_each_time(runs: Runs, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept from one evaluation to the next."""
    read: list[int] = []
    original = Digits.__getitem__

    def getitem(self: Digits, index: int) -> dict[str, Tensor]:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(Digits, "__getitem__", getitem)
    runs.train("--config", named, "--dataset.eval", "null", "--dataset.train", f"{{type: {HERE}.Letterless}}")
    # And a first batch of each set, to try it; and 32 samples, whether their loss is a mean.
    assert len(read) == 2 * 2 * 160 + 2 * 48 + 32


class Letterless(DigitsDataset):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def test_evaluate_says_that_the_code_has_changed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its numbers may then be others than those of training."""
    best = str(runs.train("--progress.epoch", "1") / "checkpoints" / "best.pt")
    capsys.readouterr()
    assert evaluate.main(["--model_pt", best]) == 0 and "has changed" not in capsys.readouterr().err
    monkeypatch.setattr("cli.trained.code_of", lambda: {**code_of(), "custom/config.py": "0"})
    assert evaluate.main(["--model_pt", best]) == 0
    assert "the code has changed since best.pt was saved: custom/config.py\n" in capsys.readouterr().err


def test_evaluate_never_builds_the_training_data(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """Only the split that was asked for is built, and its numbers are those that training printed."""
    folder = runs.train("--progress.epoch_eval", "1", "--progress.epoch", "1")
    never = ["--dataset.train", f"{{type: {HERE}.NeverBuilt}}"]
    path = folder / "checkpoints" / "latest.pt"
    measured = evaluated(path, *never, "--dataset.val", f"{{type: {HERE}.NeverBuilt}}")
    assert measured["values"] == metrics(folder, "eval")[-1]["values"]
    assert evaluated(path, *never, "--split", "val")["values"] == metrics(folder, "val")[-1]["values"]
    with pytest.raises(AssertionError, match="the training data were built"):
        evaluated(path, *never, "--split", "train")


def test_an_evaluation_keeps_no_graph() -> None:
    """A task may need gradients in evaluation (forces): the memory of its batches is free again after each."""
    sums = LossSums()
    sums.add({"loss": torch.ones((), requires_grad=True) * 2}, 3, 3)
    [kept] = sums._losses
    assert not kept["loss"].requires_grad
    assert sums.means(Rank()) == ({"loss": 2.0}, 3)
