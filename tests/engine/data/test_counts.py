"""The number of samples in a batch is known to the loader, not read from the batch."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Runs, load, metrics, same
from tests.ranks import several
from custom.datasets.digits_dataset import DigitsDataset
from custom.tasks.classification_task import ClassificationTask

HERE = "engine.data.test_counts"


class Pairs(DigitsDataset):
    """Batches as in torchvision's detection references: a tuple of images and one of targets."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.collate: Any = lambda items: tuple(zip(*items, strict=True))

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return item["image"], {"label": item["label"], "boxes": torch.zeros(index % 3, 4)}


class Encoded(DigitsDataset):
    """Batches that are no dicts, and whose first entry has another length."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.collate: Any = lambda items: UserDict(times=torch.zeros(7), **torch.utils.data.default_collate(items))


class PairsTask(ClassificationTask):
    def output(self, batch: Any) -> Any:
        if isinstance(batch, tuple):
            return {"logits": self.model(torch.stack(batch[0]))}
        return super().output(batch)

    def losses(self, output: Any, batch: Any) -> Any:
        labels = torch.stack([each["label"] for each in batch[1]]) if isinstance(batch, tuple) else batch["label"]
        return {"loss": nn.functional.cross_entropy(output["logits"], labels)}


def counted(train: str, val: str, size: int, *more: str) -> list[str]:
    words = ["--dataset.train", f"{{type: {train}}}", "--dataset.val", f"{{type: {val}, eval_batch_size: {size}}}"]
    words += ["--task", f"{{type: {HERE}.PairsTask}}", "--metric", "{$REPLACE: true}", "--precision.mode", "fp64"]
    words += ["--model", "{type: tests.small.Plain}", "--debug.max_samples", "40", "--progress.log_every", "1"]
    return [*words, *more]


def values(folder: Path, event: str) -> list[Any]:
    return [(entry.get("samples"), entry["values"]["loss"]) for entry in metrics(folder, event)]


@pytest.mark.parametrize("name", ["Pairs", "Encoded"])
def test_samples_are_counted_by_the_loader(runs: Runs, name: str) -> None:
    """40 samples in steps of 32 and 8, in evaluation in batches of 16: as with dicts."""
    usual = runs.train(*counted("DigitsDataset, shift: 0", "DigitsDataset", 40), name="usual")
    assert [samples for samples, _ in values(usual, "val")] == [40, 40]
    other = runs.train(*counted(f"{HERE}.{name}", f"{HERE}.{name}", 16), name="other")
    assert same(load(usual)["model"], load(other)["model"])
    assert values(usual, "train") == values(other, "train")
    for (samples, loss), (_, expected) in zip(values(other, "val"), values(usual, "val"), strict=True):
        assert (samples, loss) == (40, pytest.approx(expected, abs=1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Pairs", "Encoded"])
def test_two_processes_count_alike(runs: Runs, name: str) -> None:
    """In training, too, with gradients accumulated, and in a last step of which the ranks have unlike shares."""
    kind = f"{HERE}.{name}"
    alone = runs.train(*counted(kind, kind, 16, "--batch_size", "28"), name="alone")
    more = ["--batch_size", "7", "--optim.accumulate", "2"]
    several(runs, 2, runs.words(*counted(kind, kind, 16, *more), name="shared"))
    shared = runs.root / "shared"
    for event in ("train", "val"):
        assert len(values(alone, event)) >= 2
        for (samples, loss), (expected, mean) in zip(values(shared, event), values(alone, event), strict=True):
            assert (samples, loss) == (expected, pytest.approx(mean, abs=1e-12))
    for key, value in load(alone)["model"].items():
        torch.testing.assert_close(load(shared)["model"][key], value, rtol=0, atol=1e-12)
