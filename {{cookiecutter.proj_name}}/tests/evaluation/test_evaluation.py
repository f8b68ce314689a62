"""Evaluation: each sample once, and the same number to the last digit however the work is divided."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import Self

from common.base.errors import UserError
from common.distributed import Rank
from common.evaluation.metric import GatheredMetric, Metric, MetricDict, MetricFactory, Results
from tests.conftest import CONFIG, Runs, load, metrics
from tests.ranks import several
from tests.samples import Digits

HERE = "tests.evaluation.test_evaluation"


class Numbered(Digits):
    """The first digits, each with its place."""

    def __init__(self, data_dir: Path, mode: str, count: int) -> None:
        super().__init__(data_dir, mode)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "place": torch.tensor(index)}


def wide(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return a loss with a digit in every bit of a float64, so that its sums show the order they were added in."""
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
    """Return a run with batch norm and every kind of loss and metric."""
    order = f"{{type: {HERE}.Order, log: {runs.root / 'order.txt'}}}"
    every = "Accuracy: null, top3: {type: tests.samples.Share, k: 3}"
    every += f", surprise: {{type: {HERE}.Surprise}}, order: {order}"
    return [
        "--dataset.val", SETS, "--dataset.eval", SETS, "--best.metric", "prime.loss", "--metric", f"{{{every}}}",
        "--loss", f"{{wide: {{type: {HERE}.wide, weight: 0.1}}}}",
        "--progress.init_eval", "true", "--progress.epoch_eval", "1", "--progress.epoch", "1", *more,
    ]  # fmt: skip


def numbers(record: dict[str, Any]) -> str:
    """Return every digit, also of what is not a number."""
    return repr(record["values"])


def evaluated_on(runs: Runs, model_pt: Path, world: int, worker: int, *more: str) -> dict[str, Any]:
    """Run evaluate.py in `world` processes; its metrics.json."""
    folder = runs.root / f"measured_{world}_{worker}"
    argv = ["--model_pt", str(model_pt), "--num_workers", str(worker), "--dir.eval_dir", str(folder), *more]
    several(runs, world, argv, program="evaluate")
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "worker"), [(1, 2), (2, 0), (2, 2), (3, 0), (3, 2)])
def test_the_same_number_to_the_last_digit(
    runs: Runs, world: int, worker: int, evaluated: Callable[..., dict[str, Any]]
) -> None:
    """However many ranks and workers, in training and in evaluate.py."""
    alone = runs.train(*exact(runs), name="alone")
    first, last = metrics(alone, "eval")
    assert first["samples"] == SIZES
    assert first["values"] != last["values"]
    assert {key: value for key, value in last["values"].items() if key.endswith("order.right")} == {
        f"{name}.order.right": 1.0 for name in SIZES
    }
    assert [last["values"][f"{name}.order.samples"] for name in SIZES] == list(SIZES.values())
    # The first weights are the same on any number of ranks; later ones are not, since gradients are added otherwise.
    several(runs, world, runs.words(*exact(runs, "--num_workers", str(worker)), name="other"))
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
    words = ["--dataset.val", "{type: tests.samples.Digits, eval_batch_size: 48}", "--progress.epoch", "1"]
    usual = runs.train(*words, name="usual")
    whole = runs.train(*words, "--dataset.val.eval_batch_size", "160", name="whole")
    other = runs.train(*words, "--loader.collate", f"tests.small:{collate}", name="other")
    first, second = metrics(usual, "val")[-1], metrics(other, "val")[-1]
    assert (first["samples"], first["values"]) == (second["samples"], second["values"])
    assert first["values"] == pytest.approx(metrics(whole, "val")[-1]["values"], rel=1e-6)


class Kept(GatheredMetric):
    """Its results are its value."""

    def results(self, output: Any, batch: Any) -> Results:
        return {"x": output, "y": batch}

    def compute(self, results: Results) -> Any:
        return results["x"].tolist() + [float(ord(letter)) for letter in results["y"]]


def test_results_are_put_in_order() -> None:
    """Copies, so that no memory of a worker stays open; what is not one entry per sample is refused."""
    kept = MetricDict(MetricFactory({"mine": {"type": f"{HERE}.Kept"}}), Rank())
    shared = torch.arange(5).share_memory_()
    kept.update(shared[2:4], ["c", "d"], [2, 3])
    kept.update(shared[:2], ["a", "b"], [0, 1])
    kept.update(shared[4:], ["e"], [4])
    assert not any(results["x"].is_shared() for _, results in kept._batches["mine"])
    with pytest.raises(UserError, match=r"y has 3 for 2 samples\n.*in metric\.mine"):
        kept.update(torch.ones(2), torch.ones(3), [5, 6])
    assert list(kept.compute().values()) == [*range(5), *map(ord, "abcde")]


NAMED = """$BASE: {base}
dataset:
  val:
    $REPLACE: true
    clean: {{type: tests.samples.Digits, eval_batch_size: 64}}
    shifted: {{type: tests.samples.Digits, shift: 2}}
  eval:
    $REPLACE: true
    clean: {{type: tests.samples.Digits}}
    shifted: {{type: tests.samples.Digits, shift: 2}}
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
    """Training, choosing the best by one of them, lines, numbers, evaluate.py."""
    folder = runs.train(
        "--config", named, "--progress.epoch_eval", "1", "--progress.init_eval", "true",
        "--early_stop.patience", "5", "--monitor.writers", "[tensorboard]",
    )  # fmt: skip
    log = (folder / "train.log").read_text()
    for name in ("val.clean", "val.shifted", "eval.clean", "eval.shifted"):
        assert f"{name} data tests.samples.Digits tests/samples.py" in log
        assert f" {name} 2/2 step 10/10 | loss" in log
    entry = metrics(folder, "val")[-1]
    values = ("loss", "CrossEntropyLoss", "Accuracy")
    assert list(entry["values"]) == [f"{name}.{value}" for name in ("clean", "shifted") for value in values]
    assert entry["samples"] == {"clean": 160, "shifted": 160}
    state = load(folder, "best")
    best = max(metrics(folder, "val"), key=lambda each: each["values"]["clean.Accuracy"])
    assert state["best"]["best"][:2] == [best["values"]["clean.Accuracy"], best["step"]]
    assert (folder / "eval" / "epoch_000002" / "metrics.json").exists()
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


def tags(event: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(event / "event"))
    found.Reload()
    return set(found.Tags()["scalars"])
