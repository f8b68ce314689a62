"""Which samples of a set are drawn."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from common.distributed import Rank
from common.evaluation.gallery import SampleScore, WorstFirst
from common.monitor.labelled import draw_labelled
from common.monitor.pictures import Picture
from tests.conftest import Runs
from tests.ranks import several
from custom.tasks import classification_task

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


def photos(root: Path) -> None:
    """Three classes of images, sorted by class on the disk."""
    for label in ("cat", "dog", "a horse with a very long name"):
        (root / label).mkdir(parents=True)
        for number in range(8):
            pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{number}.png")


def test_pictures_of_a_run_on_photos(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From folders to files: validation shows every class and the same images each time, with name and class."""
    photos(tmp_path / "photos")
    texts: list[str] = []

    def noted(image: Any, text: str, ok: bool) -> Picture:
        texts.append(text)
        return draw_labelled(image, text, ok)

    monkeypatch.setattr(classification_task, "draw_labelled", noted)
    section = f"{{type: ImageFolderDataset, folder: '{tmp_path / 'photos'}', size: [8, 8]}}"
    data = [f"--dataset.{split}" for split in ("train", "val", "eval")]
    runs.train(
        *TASK, *(word for key in data for word in (key, section)), "--model.in_channels", "3", "--model.classes", "3",
        "--progress.local_progress", "true", "--progress.iter_save_progress", "0", "--progress.epoch_eval", "-1",
        "--debug.max_samples", "0", "--batch_size", "4", "--monitor.writers", "[]",
    )  # fmt: skip
    validations = [text.splitlines() for text in texts if "\n" in text][-10:]
    names = [name for _, name in validations]
    assert names[:5] == names[5:]
    assert names[:5] == ["... very long name/0.png", "cat/0.png", "dog/0.png", "... very long name/1.png", "cat/1.png"]
    for text, name in validations:
        assert text.startswith(("cat", "dog")) == name.startswith(("cat", "dog"))
        assert text.endswith("%)")


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
