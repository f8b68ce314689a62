"""Files of digits, for predictions."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common.base.files import PROJECT
from custom.datasets.digits_dataset import DigitsDataset


def test_digits_are_bright_on_dark_whatever_the_paper(tmp_path: Path) -> None:
    data = DigitsDataset(PROJECT / "data", "eval")
    pixels = (data[0]["image"][0].numpy() * 255).round().astype(np.uint8)
    for name, each in (("dark.png", pixels), ("light.png", 255 - pixels)):
        Image.fromarray(each).save(tmp_path / name)
    for sample in (found := DigitsDataset.from_files([tmp_path / "dark.png", tmp_path / "light.png"]))[0], found[1]:
        assert torch.allclose(sample["image"], data[0]["image"], atol=0.01)
