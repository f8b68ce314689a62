"""Samples, models and folders that a run cannot use as they are: said before the first step."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn

from common.base.errors import UserError
from common.base.files import FilesBelow
from common.data.image_files_dataset import ImageFiles
from library.data.image_folder_dataset import ImageFolderDataset
from tests.conftest import ErrorOf, Runs
from tests.samples import Digits
from tests.small import images as make_images


class Unfit(Digits):
    """Digits of which some do not fit to the others."""

    def __init__(self, data_dir: Path, mode: str, how: str) -> None:
        super().__init__(data_dir, mode)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        sample: dict[str, Any] = {**super().__getitem__(index)}
        if self.how == "nested":
            sample["boxes"] = [{"size": 1}]
        if index % 4 != 1:
            return sample
        image, label = sample["image"], sample["label"]
        changed = {
            "none": None,
            "empty": {"image": image, "label": None},
            "lacks": {"image": image},
            "more": {**sample, "mask": image},
            "nested": {**sample, "boxes": [{"size": 1, "kind": 2}]},
            "size": {"image": torch.zeros(1, 9, 8), "label": label},
            "text": {"image": image, "label": "three"},
            "tuple": (image, label),
        }
        return changed[self.how]


class Lazy(nn.Module):
    """A model whose first layer has no shape yet."""

    def __init__(self, shaped: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        if shaped:
            self.layers(torch.zeros(1, 1, 8, 8))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("none", r"sample \d+ of Unfit is None"),
        ("empty", r"label of sample \d+ of Unfit is None"),
        ("lacks", r"sample \d+ of Unfit has no 'label', but sample \d+ of Unfit has"),
        ("more", r"sample 0 of Unfit has no 'mask', but sample 1 of Unfit has"),
        ("nested", r"0 of boxes of sample 0 of Unfit has no 'kind', but 0 of boxes of sample 1 of Unfit has"),
        ("size", r"image of sample \d+ of Unfit is of shape .*, but image of sample \d+ of Unfit is of shape"),
        ("text", r"label of sample \d+ of Unfit is a "),
        ("tuple", r"sample \d+ of Unfit is a "),
    ],
)
def test_samples_that_make_no_batch(error_of: ErrorOf, how: str, message: str, workers: str) -> None:
    """The sample is named, and the entry."""
    section = f"{{$REPLACE: true, type: tests.data.test_unfit.Unfit, how: {how}}}"
    words = ["--dataset.train", section, "--loader.order", "{type: sequential}", "--num_workers", workers]
    assert re.search(message, error_of(*words))


def nothing(items: list[Any]) -> None:
    """A collate function without a return."""


def test_a_collate_function_that_returns_nothing(error_of: ErrorOf) -> None:
    text = error_of("--loader.collate", "tests.data.test_unfit:nothing")
    assert re.search(r"the collate function returned None for sample \d+ of Digits and the others", text)


def test_a_model_without_shapes(runs: Runs, error_of: ErrorOf) -> None:
    """Refused by name; a model that was called once is trained."""
    name = "tests.data.test_unfit.Lazy"
    text = error_of("--model", f"{{$REPLACE: true, type: {name}, shaped: false}}")
    assert "layers.1.weight, layers.1.bias: lazy modules have no shape yet" in text
    runs.train("--model", f"{{$REPLACE: true, type: {name}, shaped: true}}", "--progress.max_steps", "1")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes with two images each, and links: a broken one, one to a folder of more images, and one to itself."""
    make_images(tmp_path / "d", {"cat": 2, "dog": 2})
    make_images(tmp_path, {"more": 1})
    (tmp_path / "d" / "cat" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "up").symlink_to(tmp_path / "d")
    return tmp_path / "d"


def test_linked_folders_are_read(images: Path) -> None:
    """Once: a link to a folder above is left out, and said."""
    below = FilesBelow(images)
    names = [str(path.relative_to(images)) for path in below.files]
    assert names == ["cat/0.png", "cat/1.png", "cat/more/0.png", "dog/0.png", "dog/1.png"]
    assert "1 link to a folder above it; the first: " in str(below)
    assert len(ImageFiles(images.parent, "val", "d")) == 5


def test_broken_links(images: Path) -> None:
    """An error, unless they may be skipped; never silent."""
    (images / "dog" / "a.png").symlink_to("/nowhere/a.png")
    (images / "dog" / "b.png").symlink_to("/nowhere/b.png")
    with pytest.raises(UserError, match=r"left out: .*2 broken links.*dvc pull.*on_error: skip"):
        ImageFolderDataset(images.parent, "train", "d")
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    data = ImageFolderDataset(images.parent, "train", "d", on_error="skip")
    logger.remove(number)
    assert len(data) == 5 and "2 broken links" in lines[0]


def test_folders_without_permission(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in one warning. Root may read all, so the system's answer is replaced."""
    scan = os.scandir

    def scandir(folder: Path) -> Any:
        if Path(folder).name == "dog":
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "1 unreadable folder" in str(FilesBelow(images))


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """Files keep the names that a camera or an archive gave them."""
    for file in make_images(tmp_path / "d", {"cat": 1, "dog": 1}).rglob("*.png"):
        file.rename(file.with_name(os.fsdecode(b"na\xefve.png")))
    data = ImageFolderDataset(tmp_path, "train", "d")
    assert [data[number]["label"] for number in range(2)] == [0, 1]
