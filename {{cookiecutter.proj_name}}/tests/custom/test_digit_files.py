"""Files of digits, for predictions."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common.base.files import PROJECT
from custom.datasets.digits_dataset import DigitsDataset


def test_a_file_is_read_as_the_data_are(tmp_path: Path) -> None:
    data = DigitsDataset(PROJECT / "data", "eval")
    pixels = (data[0]["image"][0].numpy() * 255).round().astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    [sample] = DigitsDataset.from_files([tmp_path / "0.png"])
    assert torch.allclose(sample["image"], data[0]["image"], atol=0.01)
