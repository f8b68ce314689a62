"""The dataset for your own images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.base.errors import UserError
from library.data.image_folder_dataset import ImageFolderDataset
from tests.small import images


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
    with pytest.raises(UserError, match=r"0\.png: it is not in one of the formats BMP, .* replace it, or leave it out"):
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
