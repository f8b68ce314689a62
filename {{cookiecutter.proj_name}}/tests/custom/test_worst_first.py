"""Which samples of a set are drawn."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.distributed import Rank
from common.evaluation.gallery import SampleScore, WorstFirst
from common.monitor.pictures import Picture
from tests.conftest import Runs
from tests.ranks import several

TASK = ["--task", "{type: ClassificationTask}"]


class Known:
    """A task whose samples are numbers, with errors that a test has chosen."""

    def __init__(self, errors: list[SampleScore]) -> None:
        self.errors = errors

    def sample_errors(self, output: Tensor, batch: dict[str, Any]) -> list[SampleScore]:
        return [self.errors[number] for number in batch["number"].tolist()]

    def pictures(self, output: Tensor, batch: dict[str, Any], limit: int) -> list[Picture]:
        assert limit == len(output) == len(batch["name"]) == len(batch["number"]) == 1
        assert batch["name"] == [str(int(output))] and batch["scale"].shape == ()
        return [Picture(batch["name"][0], np.zeros((1, 1, 3), np.uint8))]


def shown(errors: list[SampleScore], batch_size: int, limit: int, fixed: bool) -> list[int]:
    gallery = WorstFirst(Known(errors), Rank(), limit, fixed=fixed)
    batches = [list(range(len(errors)))[at : at + batch_size] for at in range(0, len(errors), batch_size)]
    random.Random(batch_size).shuffle(batches)
    for indices in batches:
        number = torch.tensor(indices)
        batch = {"number": number, "name": list(map(str, indices)), "scale": torch.tensor(2.0)}
        gallery.add(number, batch, indices)
        assert len(gallery.kept) <= limit
    return [int(picture.name) for picture in gallery.finish()]


def test_the_worst_of_the_whole_set_whatever_the_batches_are() -> None:
    """What is kept along the way is enough: the same as from all samples at once."""
    draw = random.Random(0)
    for _ in range(40):
        errors = [
            SampleScore(draw.random() < 0.3, draw.choice([0.5, draw.random(), float("nan")]), draw.randrange(4))
            for _ in range(draw.randrange(1, 60))
        ]
        for fixed in (False, True):
            expected = shown(errors, len(errors), 7, fixed)
            assert len(expected) == min(7, len(errors))
            assert all(shown(errors, size, 7, fixed) == expected for size in (1, 3, 10))


def test_the_order_of_showing() -> None:
    """Wrong before right, the classes in turn, the highest loss first; fixed: the first of each class."""
    rows = [(True, 1, "a"), (True, 3, "a"), (True, 2, "b"), (False, 9, "a"), (False, 8, "c"), (True, 0.5, "b")]
    errors = [SampleScore(*row) for row in rows]
    assert shown(errors, 2, 6, fixed=False) == [1, 2, 0, 5, 3, 4]
    assert shown(errors, 2, 6, fixed=True) == [0, 2, 4, 1, 5, 3]


@pytest.mark.slow
def test_two_processes_draw_the_same_pictures_as_one(runs: Runs) -> None:
    """The worst of all processes in one order, to the last pixel."""
    data = ["--dataset.eval", "{type: DigitsDataset, eval_batch_size: 16}"]
    file = runs.train(*TASK, *data, "--progress.epoch", "1") / "checkpoints" / "latest.pt"
    drawn = []
    for world in (1, 2):
        folder = runs.root / f"on{world}"
        several(runs, world, ["--model_pt", str(file), "--dir.eval_dir", str(folder)], program="evaluate")
        drawn.append({path.name: path.read_bytes() for path in folder.glob("*.png")})
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 10
