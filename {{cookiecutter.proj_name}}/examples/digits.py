"""The digits of `data/digits.npz` as tensors, for examples that make their own samples of them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "val", "eval")


def load_digits(data_dir: Path, mode: str) -> tuple[Tensor, Tensor]:
    """Load the digits of one split: images (N, 1, 8, 8), float in 0..1, and labels (N,), int64."""
    with np.load(data_dir / "digits.npz") as data:
        chosen = data["split"] == SPLITS.index(mode)
        images = torch.from_numpy(data["images"][chosen]).float().div(16).unsqueeze(1)
        return images, torch.from_numpy(data["labels"][chosen]).long()
