"""Which samples are drawn, what their pictures look like, and where they go."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from common.distributed import Rank
from common.task import Picture
from parts.pictures.classification import class_errors, class_pictures
from parts.pictures.draw import draw
from parts.pictures.gallery import Selection
from tests.conftest import Runs
from tests.ranks import several
from tests.samples import Classification, Digits

HERE = __name__
Errors = list[tuple[bool, float, Any]]


class Known:
    """A task whose samples are numbers, with errors that a test has chosen."""

    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.drawn: list[int] = []

    def sample_errors(self, output: Tensor, batch: dict[str, Any]) -> Errors:
        return [self.errors[number] for number in batch["number"].tolist()]

    def pictures(self, output: Tensor, batch: dict[str, Any], limit: int) -> list[Picture]:
        assert limit == len(output) == len(batch["name"]) == len(batch["number"]) == 1
        assert batch["name"] == [str(int(output))] and batch["scale"].shape == ()
        self.drawn.append(int(output))
        return [Picture(np.zeros((1, 1)))]


def shown(errors: Errors, batch_size: int, limit: int, fixed: bool) -> list[int]:
    task: Any = Known(errors)
    selection = Selection(task, Rank(), limit, fixed=fixed)
    batches = [list(range(len(errors)))[at : at + batch_size] for at in range(0, len(errors), batch_size)]
    random.Random(batch_size).shuffle(batches)
    for indices in batches:
        number = torch.tensor(indices)
        batch = {"number": number, "name": list(map(str, indices)), "scale": torch.tensor(2.0)}
        selection.add(number, batch, indices)
        assert len(selection.kept) <= limit
    assert len(selection.finish()) == len(task.drawn)
    return task.drawn


def test_the_worst_of_the_whole_set_whatever_the_batches_are() -> None:
    """What is kept along the way is enough: the same as from all samples at once."""
    chance = random.Random(0)
    for _ in range(20):
        errors: Errors = []
        for _ in range(chance.randrange(1, 60)):
            loss = chance.choice([0.5, chance.random(), float("nan")])
            errors.append((chance.random() < 0.3, loss, chance.randrange(4)))
        for fixed in (False, True):
            expected = shown(errors, len(errors), 7, fixed)
            assert len(expected) == min(7, len(errors))
            assert all(shown(errors, size, 7, fixed) == expected for size in (1, 3, 10))


def test_the_order_of_showing() -> None:
    """Wrong before right, the classes in turn, the highest loss first; fixed: the first of each class."""
    errors: Errors = [
        (True, 1, "a"), (True, 3, "a"), (True, 2, "b"), (False, 9, "a"), (False, 8, "c"), (True, 0.5, "b")
    ]  # fmt: skip
    assert shown(errors, 2, 6, fixed=False) == [1, 2, 0, 5, 3, 4]
    assert shown(errors, 2, 6, fixed=True) == [0, 2, 4, 1, 5, 3]


def test_a_picture_shows_image_frame_and_text() -> None:
    """The frame is green or red, the text is below, and a digit of 8 x 8 is large enough to see."""
    image = np.zeros((8, 8))
    image[2, 3] = 1.0
    right = draw(Picture(image, "3 -> 3", ok=True))
    wrong = draw(Picture(image, "3 -> 5", ok=False))
    assert right.shape == wrong.shape
    middle = right.shape[1] // 2
    assert right[1, middle].argmax() == 1
    assert wrong[1, middle].argmax() == 0
    assert (right == 255).all(axis=2)[4:116].sum() == 14 * 14  # one pixel, fourteen times as large, in the frame
    assert (right[-20:] != wrong[-20:]).any()
    assert len(draw(Picture(image))) < len(right)


def test_pictures_say_what_is_right() -> None:
    """Wrong samples are red and come first; a long name is cut; without a label, it is the prediction alone."""
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
    output = {"logits": logits, "prediction": torch.tensor([1, 1]), "probability": torch.tensor([0.9, 0.9])}
    batch = {"image": torch.zeros(2, 1, 8, 8), "label": torch.tensor([1, 0]), "name": ["a" * 40, "b"]}
    right, wrong = class_pictures(["cat", "dog"], output, batch, 2)
    assert (right.ok, wrong.ok) == (True, False)
    assert wrong.text == "cat -> dog (90%)\nb"
    name = right.text.splitlines()[1]
    assert name.startswith("...") and len(name) < 40
    errors = class_errors(output, batch)
    assert errors and [entry[0] for entry in errors] == [False, True]
    (unknown, _) = class_pictures(["猫", "犬"], output, {"image": batch["image"]}, 2)
    assert (unknown.text, unknown.ok) == ("1 (90%)", None)  # in other letters: its number


@pytest.mark.parametrize("image", [torch.zeros(2, 12, 8, 8), torch.zeros(2, 8), [0, 1], None])
def test_what_is_no_image_is_not_drawn(image: Any) -> None:
    output = {"logits": torch.zeros(2, 3), "prediction": torch.zeros(2), "probability": torch.zeros(2)}
    assert class_pictures([], output, {"image": image}, 2) == []
    assert class_errors(output, {"image": image}) is None


class Noted(Classification):
    """Notes the texts of its pictures."""

    texts: list[str]

    def pictures(self, output: dict[str, Any], batch: dict[str, Any], limit: int) -> list[Picture]:
        pictures = class_pictures(self.classes, output, batch, limit)
        self.texts += [picture.text for picture in pictures]
        return pictures


class Named(Digits):
    """Three digits, each with a name."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.images = self.images[self.labels < 3]
        self.labels = self.labels[self.labels < 3]

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "name": f"digit {int(sample['label'])}"}


def test_validation_shows_every_class(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples each time, with name and class."""
    texts: list[str] = []
    monkeypatch.setattr(Noted, "texts", texts, raising=False)
    data = [word for split in ("train", "val") for word in (f"--dataset.{split}", f"{{type: {HERE}.Named}}")]
    folder = runs.train(
        "--task.type",
        f"{HERE}.Noted",
        *data,
        "--pictures",
        "{every: 0, number: 5}",
        "--monitor.writers",
        "[tensorboard]",
    )
    validations = [text.splitlines() for text in texts][-10:]
    names = [name for _, name in validations]
    assert names[:5] == names[5:] == [f"digit {number}" for number in (0, 1, 2, 0, 1)]
    assert all(text.startswith(name[-1]) and text.endswith("%)") for text, name in validations)
    board = EventAccumulator(str(folder / "event")).Reload().Tags()
    assert set(board["images"]) == {"view/val"}


SETS = "{$REPLACE: true, clean: {type: tests.samples.Digits}, moved: {type: tests.samples.Digits, shift: 1}}"


def test_pictures_on_disk(runs: Runs) -> None:
    """After the first step, every four and the last; in the folder of an evaluation one of each sample."""
    folder = runs.train(
        "--dataset.val", SETS, "--dataset.eval", SETS, "--best.metric", "clean.loss",
        "--progress.epoch_eval", "2", "--pictures", "{files: true, every: 4, number: 3}",
    )  # fmt: skip
    files = {path.name for path in (folder / "progress" / "train").rglob("*.png")}
    assert files == {f"step_{step:08}.png" for step in (1, 4, 8, 10)}
    for name in ("clean", "moved"):
        assert len(list((folder / "progress" / "val" / name).glob("*.png"))) == 2
        assert len(list((folder / "eval" / "epoch_000002" / name).glob("*.png"))) == 3


class Bare(Classification):
    """Its output does not say which class was predicted."""

    outputs = 0

    def output(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        type(self).outputs += not torch.is_grad_enabled()
        return super().output(batch)

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        return output


def test_a_task_that_draws_nothing(runs: Runs) -> None:
    """Of its training data one batch is tried, and the log says so."""
    words = ["--dataset", "{val: null, eval: null}", "--best.metric", "loss", "--pictures", "{files: true, every: 2}"]
    folder = runs.train("--task", f"{{type: {HERE}.Bare}}", *words)
    assert Bare.outputs == 1 and not (folder / "progress").exists()
    assert "no pictures of training batches" in (folder / "train.log").read_text()


@pytest.mark.slow
def test_two_processes_draw_the_same_pictures_as_one(runs: Runs) -> None:
    """The worst of all processes in one order, to the last pixel."""
    data = ["--dataset.eval", "{type: tests.samples.Digits, eval_batch_size: 16}", "--pictures.number", "8"]
    file = runs.train(*data, "--progress.epoch", "1") / "checkpoints" / "latest.pt"
    drawn = []
    for world in (1, 2):
        folder = runs.root / f"on{world}"
        several(runs, world, ["--model_pt", str(file), "--dir.eval_dir", str(folder)], program="evaluate")
        drawn.append({path.name: path.read_bytes() for path in folder.glob("*.png")})
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 8
