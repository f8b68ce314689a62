"""The data set for your own images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.config.test_bad_input import images
from custom.datasets.image_folder_dataset import ImageFolderDataset


def test_pictures_of_every_kind(tmp_path: Path) -> None:
    """16 bits are scaled and not cut off, a turned photo is turned back, hidden files are nobody's data."""
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
