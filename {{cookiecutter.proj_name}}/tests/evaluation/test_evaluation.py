"""Evaluation: each sample once, and the same number to the last digit however the work is divided."""

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import Self

from common.base.context import error_context, with_notes
from common.base.errors import UserError
from common.config import resolve
from common.data.plan import evaluation_keys
from common.distributed import Rank
from common.evaluation.loss import LossSums
from common.evaluation.metric import GatheredMetric, Metric, MetricFactory, Results, SampleBuffer
from cli.evaluation_folder import EvalConfig
from tests.conftest import CONFIG, Runs, load, metrics
from tests.ranks import failed, several, start_ranks
from custom.config import Config
from custom.datasets.digits_dataset import DigitsDataset

HERE = "tests.evaluation.test_evaluation"


class Numbered(DigitsDataset):
    """The first digits, each with its place."""

    def __init__(self, data_dir: Path, mode: str, count: int) -> None:
        super().__init__(data_dir, mode)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "place": torch.tensor(index)}


class BrokenAt(Numbered):
    """One that cannot give a certain sample."""

    def __init__(self, data_dir: Path, mode: str, count: int, at: int, told: bool = False) -> None:
        super().__init__(data_dir, mode, count)
        self.at, self.told = at, told

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.at:
            raise UserError("this file is broken") if self.told else ZeroDivisionError("by nothing")
        return super().__getitem__(index)


class NeverBuilt:
    """Training data that nobody may touch."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        raise AssertionError("the training data were built")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


def wide(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss with a digit in every bit of a float64, so that its sums show the order they were added in."""
    return output["logits"].double().exp().mean()


class Surprise(Metric):
    """Mean logarithm of the probability of what was predicted: floats, added in any order and rounded once."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        self.values += output["probability"].double().log().tolist()

    def merge(self, other: Self) -> None:
        self.values += other.values

    def compute(self) -> float:
        return math.fsum(self.values) / len(self.values)


class Order(GatheredMetric):
    """Whether every sample is there once and in order, as a tensor and as lists of things of differing size."""

    def __init__(self, log: str) -> None:
        self.log = log

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        places = batch["place"].tolist()
        return {"place": batch["place"], "boxes": [torch.full((place % 3, 4), place) for place in places]}

    def compute(self, results: Results) -> dict[str, float]:
        with open(self.log, "a") as file:
            file.write(f"{os.environ.get('RANK', '0')}\n")
        places = results["place"].tolist()
        boxes = [(len(each), set(each.flatten().tolist())) for each in results["boxes"]]
        expected = [(place % 3, {place} if place % 3 else set()) for place in range(len(places))]
        return {"samples": len(places), "right": places == list(range(len(places))) and boxes == expected}


def digits(count: int, batch: int) -> str:
    return f"{{type: {HERE}.Numbered, count: {count}, eval_batch_size: {batch}}}"


# Fewer samples than ranks; fewer batches than ranks; a prime number of samples and a last batch of one.
SETS = f"{{$REPLACE: true, two: {digits(2, 1)}, one_batch: {digits(5, 8)}, prime: {digits(43, 7)}}}"
SIZES = {"two": 2, "one_batch": 5, "prime": 43}


def exact(runs: Runs, *more: str) -> list[str]:
    """A run with batch norm and every kind of loss and metric."""
    order = f"{{type: {HERE}.Order, log: {runs.root / 'order.txt'}}}"
    every = "Accuracy: null, top3: {type: Accuracy, k: 3}, AreaUnderCurve: null, MeanAveragePrecision: null"
    every += f", ConfusionMatrix: {{per_class: true}}, surprise: {{type: {HERE}.Surprise}}, order: {order}"
    return [
        "--dataset.val", SETS, "--dataset.eval", SETS, "--best.metric", "prime.loss", "--metric", f"{{{every}}}",
        "--loss", f"{{wide: {{type: {HERE}.wide, weight: 0.1}}}}",
        "--progress.init_eval", "true", "--progress.epoch_eval", "1", "--progress.epoch", "1", *more,
    ]  # fmt: skip


def numbers(record: dict[str, Any]) -> str:
    """Every digit, also of what is not a number."""
    return repr(record["values"])


def evaluated_on(runs: Runs, model_pt: Path, world: int, worker: int, *more: str) -> dict[str, Any]:
    """Run evaluate.py in `world` processes; its metrics.json."""
    folder = runs.root / f"measured_{world}_{worker}"
    argv = ["--model_pt", str(model_pt), "--worker", str(worker), "--dir.eval_dir", str(folder), *more]
    several(runs, world, argv, program="evaluate")
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "worker"), [(1, 2), (2, 0), (2, 2), (3, 0), (3, 2)])
def test_the_same_number_to_the_last_digit(
    runs: Runs, world: int, worker: int, evaluated: Callable[..., dict[str, Any]]
) -> None:
    """R-66, D-01, D-02, D-66, MM-69, QQ-45: however many ranks and workers, in training and in evaluate.py."""
    alone = runs.train(*exact(runs), name="alone")
    first, last = metrics(alone, "eval")
    assert first["samples"] == SIZES
    assert first["values"] != last["values"]
    assert {key: value for key, value in last["values"].items() if key.endswith("order.right")} == {
        f"{name}.order.right": 1.0 for name in SIZES
    }
    assert [last["values"][f"{name}.order.samples"] for name in SIZES] == list(SIZES.values())
    # The first weights are the same on any number of ranks; later ones are not, since gradients are added otherwise.
    several(runs, world, runs.words(*exact(runs, "--worker", str(worker)), name="other"))
    other = metrics(runs.root / "other", "eval")
    assert numbers(other[0]) == numbers(first)
    assert numbers(evaluated(runs.root / "other" / "checkpoints" / "latest.pt")) == numbers(other[-1])
    there = evaluated_on(runs, alone / "checkpoints" / "latest.pt", world, worker)
    assert numbers(there) == numbers(last)
    assert there["samples"] == SIZES
    # Each whole-set metric was computed once, by the main process.
    assert set((runs.root / "order.txt").read_text().split()) == {"0"}


@pytest.mark.parametrize("collate", ["as_mapping", "as_object", "time_first"])
def test_samples_are_counted_whatever_a_batch_is(runs: Runs, collate: str) -> None:
    """By the loader, which knows them: the last batch is smaller, so a wrong count would change the mean."""
    words = ["--dataset.val", "{type: DigitsDataset, eval_batch_size: 48}", "--progress.epoch", "1"]
    usual = runs.train(*words, name="usual")
    whole = runs.train(*words, "--dataset.val.eval_batch_size", "160", name="whole")
    other = runs.train(*words, "--loader.collate", f"tests.parts:{collate}", name="other")
    first, second = metrics(usual, "val")[-1], metrics(other, "val")[-1]
    assert (first["samples"], first["values"]) == (second["samples"], second["values"])
    assert first["values"] == pytest.approx(metrics(whole, "val")[-1]["values"], rel=1e-6)


def test_shares_are_whole_batches() -> None:
    """R-66, MM-69: dealt out in turn, so that shares differ by one batch at most; each sample once, no padding."""
    for world in (1, 2, 3, 8):
        shares = [[indices for _, indices in evaluation_keys(23, 4, rank, world)] for rank in range(world)]
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
    """R-66: rounded once, whatever the order; an infinite loss ends no evaluation."""
    for _ in range(3):
        random.Random(3).shuffle(values)
        sums = LossSums()
        for value in values:
            sums.add({"loss": torch.tensor(value, dtype=torch.float64)}, 1, 1)
        assert sums.means(Rank())[0]["loss"] == pytest.approx(mean, rel=0, abs=0, nan_ok=True)


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


# Whole-set metrics.


def test_results_are_put_in_order() -> None:
    """QQ-44, MM-68: copies, so that no memory of a worker stays open; what is not one entry per sample is refused."""
    kept = SampleBuffer("mine")
    shared = torch.arange(5).share_memory_()
    kept.add({"x": shared[2:4], "y": ["c", "d"]}, [2, 3])
    kept.add({"x": shared[:2], "y": ["a", "b"]}, [0, 1])
    kept.add({"x": shared[4:], "y": ["e"]}, [4])
    assert not any(results["x"].is_shared() for _, results in kept._batches)
    with pytest.raises(UserError, match=r"metric\.mine: .*y has 3 for 2 samples"):
        kept.add({"x": torch.ones(2), "y": torch.ones(3)}, [5, 6])
    results = kept.gather(Rank())
    assert (results["x"].tolist(), results["y"]) == ([0, 1, 2, 3, 4], list("abcde"))


class Neither:
    """No metric."""


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"metric\.mine: Neither derives from neither Metric nor GatheredMetric"):
        MetricFactory({"mine": {"type": f"{HERE}.Neither"}})


# Errors say where.


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_an_error_on_one_rank_says_where(runs: Runs, told: bool) -> None:
    """D-01: the set, the batch and its samples, in the log of that rank; the others do not wait for ever."""
    broken = f"{{type: {HERE}.BrokenAt, count: 43, at: 37, eval_batch_size: 7, told: {str(told).lower()}}}"
    words = ["--dataset.val", f"{{$REPLACE: true, first: {digits(5, 8)}, second: {broken}}}", "--progress.epoch", "1"]
    argv = runs.words(*words, "--best.metric", "first.loss", "--debug.max_samples", "0")
    ended = failed(start_ranks(runs.root, 2, argv))
    assert ended.codes == [1, 2 if told else 1]
    log = (runs.root / "run" / "train.log").read_text()  # rank 0 tells it
    assert "in the evaluation on val.second, batch 6 of 7, samples 35 to 41" in log
    assert (
        "this file is broken" if told else "sample 37 of BrokenAt cannot be read: ZeroDivisionError: by nothing"
    ) in log
    assert ("Traceback" in log) is not told


def test_notes() -> None:
    """An error keeps its type and text, and gets a note of each place around it; the inner one first."""
    with pytest.raises(KeyError) as caught, error_context(lambda: "in the house"), error_context(lambda: "in the room"):
        raise KeyError("lamp")
    assert caught.value.__notes__ == ["in the room", "in the house"]
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


# Several evaluation sets by name.

NAMED = """$BASE: {base}
dataset:
  val:
    $REPLACE: true
    clean: {{type: DigitsDataset, eval_batch_size: 64}}
    shifted: {{type: DigitsDataset, shift: 2}}
  eval:
    $REPLACE: true
    clean: {{type: DigitsDataset}}
    shifted: {{type: DigitsDataset, shift: 2}}
best: {{metric: clean.Accuracy, mode: max}}
"""


@pytest.fixture
def named(tmp_path: Path) -> str:
    """A config with named sets."""
    file = tmp_path / "named.yaml"
    file.write_text(NAMED.format(base=CONFIG))
    return str(file)


def test_named_sets_from_the_config_to_the_files(
    runs: Runs, named: str, evaluated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """QQ-43: training, choosing the best by one of them, lines, numbers and pictures, evaluate.py, a resume."""
    folder = runs.train(
        "--config", named, "--progress.epoch_eval", "1", "--progress.init_eval", "true",
        "--optim.lr_scheduler", "{type: plateau, mode: max, patience: 1}", "--early_stop.patience", "5",
        "--monitor.writers", "[tensorboard]", "--progress.local_progress", "true",
    )  # fmt: skip
    log = (folder / "train.log").read_text()
    for name in ("val.clean", "val.shifted", "eval.clean", "eval.shifted"):
        assert f"{name} data DigitsDataset custom/datasets/digits_dataset.py" in log
        assert f" {name} 2/2 step 10/10 | loss" in log
    entry = metrics(folder, "val")[-1]
    values = ("loss", "CrossEntropyLoss", "Accuracy")
    assert list(entry["values"]) == [f"{name}.{value}" for name in ("clean", "shifted") for value in values]
    assert entry["samples"] == {"clean": 160, "shifted": 160}
    state = load(folder, "best")
    best = max(metrics(folder, "val"), key=lambda each: each["values"]["clean.Accuracy"])
    assert state["best"]["best"][:2] == [best["values"]["clean.Accuracy"], best["step"]]
    left = folder / "eval" / "epoch_000002"
    assert {path.name for path in left.iterdir()} == {"metrics.json", "clean", "shifted"}
    assert len(list((left / "shifted").glob("*.png"))) == 10
    assert len(list((folder / "progress" / "val" / "clean").rglob("*.png"))) == 2 * 5
    assert {"Val/clean.loss", "Val/shifted.Accuracy", "eval/clean.Accuracy"} <= tags(folder)
    # evaluate.py, from the run's own config: a table each, the same numbers (shift draws by the sample).
    capsys.readouterr()
    measured = evaluated(folder / "checkpoints" / "latest.pt")
    assert measured["values"] == metrics(folder, "eval")[-1]["values"]
    assert measured["values"]["clean.loss"] != measured["values"]["shifted.loss"]
    printed = capsys.readouterr().out
    for name in ("clean", "shifted"):
        _, _, below = printed.partition(f"{name}:\n  samples   160\n")
        assert f"  Accuracy  {measured['values'][f'{name}.Accuracy']:.5f}\n" in below
    # What is evaluated may change in a resume.
    again = ["--resume", str(folder), "--config", str(folder / "config.yaml"), "--progress.epoch", "3"]
    runs.train(*again, "--dataset.val.shifted.shift", "1")
    assert "this resume is bit-exact" in (folder / "train.log").read_text()


def tags(event: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(event / "event"))
    found.Reload()
    return set(found.Tags()["scalars"])


def test_named_sets_on_the_command_line(runs: Runs, named: str) -> None:
    """QQ-43: whole, by one key of one set, and a set of the base left out."""
    folder = runs.train(
        "--dataset.eval", "{$REPLACE: true, a: {type: DigitsDataset}, b-2: {type: DigitsDataset, shift: 1}}",
        "--progress.epoch_eval", "1", "--progress.epoch", "1",
    )  # fmt: skip
    assert metrics(folder, "eval")[-1]["samples"] == {"a": 160, "b-2": 160}
    resolved = resolve(EvalConfig, [named], ["--dataset.eval.clean.eval_batch_size", "64"])
    assert resolved.config.dataset.eval == {
        "clean": {"type": "DigitsDataset", "eval_batch_size": 64},
        "shifted": {"type": "DigitsDataset", "shift": 2},
    }
    words = ["--dataset.val.shifted", "null", "--dataset.eval", "null", "--progress.epoch", "1"]
    folder = runs.train("--config", named, *words, name="less")
    assert list(metrics(folder, "val")[-1]["values"]) == ["clean.loss", "clean.CrossEntropyLoss", "clean.Accuracy"]


@pytest.mark.parametrize(
    ("option", "value", "key", "text"),
    [
        ("--dataset.eval.more", "{typ: DigitsDataset}", "dataset.eval.more.typ = 'DigitsDataset'",
         "unknown key; did you mean dataset.eval.more.type?"),
        ("--dataset.eval.clean.type", "DigitDataset", "dataset.eval.clean.type = 'DigitDataset'",
         "did you mean DigitsDataset?"),
        ("--dataset.eval.clean.shft", "2", "dataset.eval.clean.shft = 2", "did you mean shift?"),
        ("--dataset.eval.clean.eval_batchsize", "2", "dataset.eval.clean.eval_batchsize = 2",
         "did you mean eval_batch_size?"),
        ("--dataset.eval.clean.eval_batch_size", "0", "dataset.eval.clean.eval_batch_size = 0", "at least 1"),
        ("--dataset.eval.clean.shift", "far", "dataset.eval.clean.shift = 'far'", "must be an integer"),
        ("--dataset.eval.clean", "Digits", "dataset.eval.clean = 'Digits'", "must be a section"),
        ("--dataset.eval", "{a/b: {type: DigitsDataset}}", "dataset.eval.a/b", "only letters, digits, _ and -"),
        ("--dataset.eval", "{a.b: {type: DigitsDataset}}", "dataset.eval.a.b", "only letters, digits, _ and -"),
        ("--dataset.eval.eval_batch_size", "64", "dataset.eval.eval_batch_size = 64", "must be a section"),
        ("--dataset.train", "{$REPLACE: true, a: {shift: 1}}", "dataset.train.type", "must name a dataset"),
        ("--best.metric", "clean.Acuracy", "best.metric = 'clean.Acuracy'", "did you mean clean.Accuracy?"),
        ("--best.metric", "cleen.loss", "best.metric = 'cleen.loss'", "did you mean clean.loss?"),
        ("--best.metric", "loss", "best.metric = 'loss'", "name the set too, as in clean.loss"),
    ],
)  # fmt: skip
def test_mistakes_in_named_sets(named: str, option: str, value: str, key: str, text: str) -> None:
    """QQ-43: each is told with its whole key, and with what to do."""
    with pytest.raises(UserError) as caught:
        resolve(Config, [named], [option, value])
    told = str(caught.value)
    assert "1 problem:" in told
    assert f"  {key}  (" in told
    assert text in told


def test_a_named_set_that_inherits_a_type(tmp_path: Path) -> None:
    """QQ-43: merged with a base's single set, named ones are refused, with the line."""
    text = "$BASE: {}\ndataset:\n  eval:\n    clean: {{type: DigitsDataset}}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(text.format(CONFIG))
    with pytest.raises(UserError) as caught:
        resolve(Config, [file])
    told = str(caught.value)
    assert "  dataset.eval.clean  (" in told and "mine.yaml:4" in told
    assert "is not an argument of DigitsDataset" in told


def test_classes_of_each_set_are_checked(runs: Runs, named: str) -> None:
    """QQ-43: as those of a single one."""
    with pytest.raises(UserError, match=r"model\.classes: 9, but dataset\.train has 10"):
        runs.train("--config", named, "--model.classes", "9")
    other = f"{{type: {HERE}.Letters}}"
    with pytest.raises(UserError, match=r"dataset\.eval\.letters has the classes a, b"):
        runs.train("--config", named, "--dataset.eval.letters", other)
    missing = "{type: ImageFolderDataset, folder: nowhere}"
    with pytest.raises(UserError, match=r"there is no folder") as caught:
        runs.train("--config", named, "--dataset.eval.more", missing)
    assert "in building dataset.eval.more" in with_notes(caught.value)


class Letters(DigitsDataset):
    """Digits that are called by letters."""

    classes = tuple("abcdefghij")


def test_evaluation_reads_its_data_again_each_time(runs: Runs, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """QQ-43: nothing is kept from one evaluation to the next."""
    read: list[int] = []
    original = DigitsDataset.__getitem__

    def getitem(self: DigitsDataset, index: int) -> dict[str, Tensor]:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(DigitsDataset, "__getitem__", getitem)
    runs.train("--config", named, "--dataset.eval", "null", "--dataset.train", f"{{type: {HERE}.Letterless}}")
    # And a first batch of each set, to try it; and 32 samples, whether their loss is a mean.
    assert len(read) == 2 * 2 * 160 + 2 * 48 + 32


class Letterless(DigitsDataset):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def test_evaluate_never_builds_the_training_data(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """R-02: only the split that was asked for is built, and its numbers are those that training printed."""
    folder = runs.train("--progress.epoch_eval", "1", "--progress.epoch", "1")
    never = ["--dataset.train", f"{{type: {HERE}.NeverBuilt}}"]
    path = folder / "checkpoints" / "latest.pt"
    measured = evaluated(path, *never, "--dataset.val", f"{{type: {HERE}.NeverBuilt}}")
    assert measured["values"] == metrics(folder, "eval")[-1]["values"]
    assert evaluated(path, *never, "--split", "val")["values"] == metrics(folder, "val")[-1]["values"]
    with pytest.raises(AssertionError, match="the training data were built"):
        evaluated(path, *never, "--split", "train")


def test_a_drawn_seed_is_that_of_the_run(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """R-02: data that draw random numbers are, in evaluate.py, what they were in training."""
    folder = runs.train(
        "--dist.random_seed", "null", "--dataset.eval.shift", "2", "--progress.epoch_eval", "1", "--progress.epoch", "1"
    )
    assert evaluated(folder / "checkpoints" / "latest.pt")["values"] == metrics(folder, "eval")[-1]["values"]
