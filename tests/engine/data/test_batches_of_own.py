"""A batch sampler, as docs/data.md builds one: an item of the dataset is a batch of about as many pixels with ink."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from common.base.errors import UserError
from common.data.keyed import KeyedBatches
from common.data.order import EpochOrder
from common.evaluation.metric import GatheredMetric, Results
from tests.conftest import PROJECT, Runs, load, metrics, same
from tests.ranks import several
from tests.samples import Digits
from custom.datasets.digits_dataset import DigitsDataset

PAGE = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
# The page's two files, as one module. They are registered there; here their classes are named by import path.
CODE = re.findall(r"```python\n# custom/(?:datasets/budget_dataset|tasks/budget_task)\.py\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's code, as a module."""
    assert len(CODE) == 2
    text = re.sub(r"@\w+_REGISTRY.register\(\)\n", "", "\n".join(CODE))
    (tmp_path / "page_budget.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield "page_budget"
    sys.modules.pop("page_budget", None)


def words(module: str, *more: str, accumulate: int = 2) -> list[str]:
    data = f"{{$REPLACE: true, type: {module}.Budget, budget: 500}}"
    task = ["--task", f"{{$REPLACE: true, type: {module}.BudgetTask}}", "--dataset.train", data]
    size = ["--batch_size", "1", "--dataset.val.eval_batch_size", "64", "--debug.max_samples", "8"]
    return [
        *task,
        *size,
        "--optim.accumulate",
        f"{accumulate}",
        "--progress.epoch",
        "2",
        "--precision.mode",
        "fp64",
        *more,
    ]


def test_cut_inside_an_epoch(runs: Runs, module: str) -> None:
    """With other batches in the second epoch; the same bits."""
    whole = runs.train(*words(module), name="whole")
    runs.train(*words(module, "--progress.max_steps", "7"), name="cut")
    cut = runs.train(*words(module, "--resume", "auto"), name="cut")
    same(load(whole)["model"], load(cut)["model"])


@pytest.mark.slow
def test_two_processes_train_on_the_same_samples(runs: Runs, module: str) -> None:
    """Each step is the mean over the samples of both; in the last step of an epoch, one of them has none."""
    more = ["--model", "{$REPLACE: true, type: tests.small.Plain}", "--optim.optim_type", "SGD"]
    alone = runs.train(*words(module, *more), name="alone")
    several(runs, 2, runs.words(*words(module, *more, accumulate=1), name="both"))
    both = load(runs.root / "both")["model"]
    for name, value in load(alone)["model"].items():
        torch.testing.assert_close(both[name], value, rtol=1e-9, atol=1e-12)


class Growing:
    """A mistake: more items in the second epoch."""

    def __init__(self) -> None:
        self.size = 13

    def set_epoch(self, epoch: int) -> None:
        self.size = 13 + 2 * epoch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index


def test_a_dataset_that_grows_is_named() -> None:
    order = EpochOrder({"type": "shuffle"}, Growing(), 0)
    with pytest.raises(UserError, match=r"the length of Growing changed from 13 to 15 in epoch 2; it must stay"):
        order(1)


class Drawing:
    """A collate function that draws, of data that do not."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, items: list[Any]) -> Any:
        batch = default_collate(items)
        return {**batch, "image": batch["image"] + torch.rand(())}


class Still(Digits):
    random = False


@pytest.mark.parametrize("own", [True, False])
def test_a_collate_function_that_draws_is_seeded(own: bool) -> None:
    """Whatever the dataset promises of itself; its own collate function keeps that promise."""
    dataset = Still(Path(), "train")
    batches = KeyedBatches(dataset, Drawing(dataset), seed=1)
    if own:
        dataset.collate = batches.collate  # type: ignore[attr-defined]
        batches = KeyedBatches(dataset, batches.collate, seed=1)
    first, second = (batches.__getitems__((0, [1, 2]))["image"] for _ in range(2))
    assert torch.equal(first, second) != own


class Sizes(GatheredMetric):
    """One entry for each sample."""

    def results(self, output: Any, batch: Any) -> Results:
        return {"label": batch["label"]}

    def compute(self, results: Results) -> float:
        return float(len(results["label"]))


def test_batches_of_their_own_are_evaluated(runs: Runs, module: str) -> None:
    """With pictures, and metrics that need each sample, also in training."""
    data = f"{{$REPLACE: true, type: {module}.Budget, budget: 500, eval_batch_size: 1}}"
    more = ["--metric", f"{{$REPLACE: true, sizes: {{type: {__name__}.Sizes}}}}", "--progress.train_metric", "true"]
    more += ["--best.metric", "loss", "--debug.max_samples", "200", "--progress.log_every", "1"]
    given = [word for word in words(module) if word not in ("--dataset.val.eval_batch_size", "--debug.max_samples")]
    given = [word for word in given if word not in ("64", "8")]
    folder = runs.train(*given, *more, "--dataset.val", data, "--pictures.number", "4")
    size = len(DigitsDataset(PROJECT / "data", "val"))
    assert metrics(folder, "val")[-1]["values"]["sizes"] == size
    assert "a micro-batch of 1 sample" not in (folder / "train.log").read_text()
