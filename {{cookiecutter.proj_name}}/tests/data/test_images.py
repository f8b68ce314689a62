"""Images in files and folders, and what turns data of others into samples."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from loguru import logger
from PIL import Image

from common.base.errors import UserError
from library.data.files_below import files_below
from library.data.image_files_dataset import ImageFiles
from library.data.image_folder_dataset import ImageFolderDataset
from library.data.sample_transform import ToFloat
from tests.parts.transforms.test_transforms import build


def images(folder: Path, classes: dict[str, int]) -> Path:
    """Return a folder of small images, so many in each class."""
    for label, count in classes.items():
        (folder / label).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (9, 7, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def test_pictures_of_every_kind(tmp_path: Path) -> None:
    """16 bits are scaled and not cut off, a turned photo is turned back, hidden files are no data."""
    folder = images(tmp_path / "i", {"cat": 1, ".ipynb_checkpoints": 1, "dog": 1})
    (folder / "dog" / "._0.png").write_bytes(b"no picture")
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(folder / "cat" / "0.png")
    turned = Image.new("L", (8, 8))
    turned.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 3  # held upside down
    turned.save(folder / "dog" / "0.png", exif=exif)
    data = ImageFolderDataset(tmp_path, "train", "i", size=[8, 8], channels=1)
    assert data.classes == ("cat", "dog")
    assert len(data) == 2
    assert data[0]["image"].flatten()[32] == pytest.approx(0.5, abs=0.02)
    assert data[1]["image"][0, 7, 7] == 1.0


def test_only_image_formats_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS file under another name is refused, rather than given to Ghostscript."""
    folder = images(tmp_path / "i", {"cat": 1, "dog": 1})
    (folder / "cat" / "0.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    )
    program, trace = tmp_path / "gs", tmp_path / "trace"
    program.write_text(f"#!/bin/sh\ntouch '{trace}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    data = ImageFolderDataset(tmp_path, "train", "i", size=[8, 8], channels=1)
    with pytest.raises(UserError, match=r"0\.png: it is not in one of the formats BMP, .* replace or remove it"):
        data[0]
    assert not trace.exists()


def test_parts_of_a_folder(tmp_path: Path) -> None:
    """Each image is in one part, and stays there when others are added."""
    folder = images(tmp_path / "i", {"cat": 30, "dog": 30})

    def names(low: float, high: float) -> set[str]:
        data = ImageFolderDataset(tmp_path, "train", "i", size=[8, 8], part=[low, high])
        return {str(Path(path).relative_to(folder)) for path in data.sample_ids()}

    train, val = names(0, 0.7), names(0.7, 1)
    assert train and val and not train & val
    assert train | val == {f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(30)}
    (folder / "cat" / "00.png").write_bytes((folder / "cat" / "0.png").read_bytes())
    assert names(0.7, 1) - {"cat/00.png"} == val


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Two classes with two images each, and links: one to a folder of more images, and one to itself."""
    images(tmp_path / "d", {"cat": 2, "dog": 2})
    images(tmp_path, {"more": 1})
    (tmp_path / "d" / "cat" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "up").symlink_to(tmp_path / "d")
    return tmp_path / "d"


def test_linked_folders_are_read(linked: Path) -> None:
    """Once: a link to a folder above is left out, and said."""
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    names = [str(path.relative_to(linked)) for path in files_below(linked)]
    logger.remove(number)
    assert names == ["cat/0.png", "cat/1.png", "cat/more/0.png", "dog/0.png", "dog/1.png"]
    assert len(lines) == 1 and "cat/more/up is a link to a folder above it" in lines[0]
    assert len(ImageFiles(linked.parent, "val", "d")) == len(ImageFolderDataset(linked.parent, "val", "d")) == 5


def test_broken_links(linked: Path) -> None:
    """An error; never silent."""
    (linked / "dog" / "a.png").symlink_to("/nowhere/a.png")
    with pytest.raises(UserError, match=r"dog/a.png is a broken link.*dvc pull"):
        ImageFolderDataset(linked.parent, "train", "d")


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """Files keep the names that a camera or an archive gave them."""
    for file in images(tmp_path / "d", {"cat": 1, "dog": 1}).rglob("*.png"):
        file.rename(file.with_name(os.fsdecode(b"na\xefve.png")))
    data = ImageFolderDataset(tmp_path, "train", "d")
    assert [data[number]["label"] for number in range(2)] == [0, 1]


def test_a_data_set_made_for_no_project() -> None:
    """By import path: it gets neither `data_dir` nor `mode`; its tuples become dicts of tensors."""
    kind = "tests.parts.transforms.test_transforms.Tuples"
    data = build(kind, {"type": "Named", "names": ["image", "label"]}, {"type": "ToFloat"}, size=40)
    assert set(data[30]) == {"image", "label"} and data[30]["label"] == 0
    assert data[30]["image"].shape == (1, 8, 8) and float(data[30]["image"][0, 0, 0]) == pytest.approx(30 / 255)
    colours = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert torch.equal(ToFloat()(Image.fromarray(colours))[1] * 255, torch.tensor(colours[..., 1]).float())
    assert build("tests.samples.Digits", {"type": "Normalize", "mean": [0.5], "std": [1.0]}).random is False
