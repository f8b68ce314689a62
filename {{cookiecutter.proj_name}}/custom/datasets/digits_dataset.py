"""The example dataset: 1,797 handwritten digits, included in the project (source, licence: data/README.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY

_SPLITS = {"train": 0, "val": 1, "eval": 2}


@DATASET_REGISTRY.register()
class DigitsDataset:
    """Images of 8 x 8 pixels in 10 classes, with a fixed split into train, val and eval (the test set).

    Args:
        data_dir: folder that contains `digits.npz`.
        mode: train, val or eval.
        shift: shift each image at random by up to this many pixels (for training).
    """

    classes = tuple("0123456789")

    def __init__(self, data_dir: Path, mode: str, shift: int = 0) -> None:
        path = data_dir / "digits.npz"
        if not path.is_file():
            raise UserError(f"dataset.{mode}: there is no {path}; dir.data_dir must be the folder that contains it")
        with np.load(path) as data:
            chosen = data["split"] == _SPLITS[mode]
            self.numbers = np.flatnonzero(chosen)
            # 16 grey levels become 0..1.
            self.images = torch.from_numpy(data["images"][chosen]).float().div_(16).unsqueeze_(1)
            self.labels = torch.from_numpy(data["labels"][chosen]).long()
        self.shift = shift
        # Whether items draw random numbers; if not, the loader skips seeding.
        self.random = shift > 0

    suffixes = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

    @classmethod
    def from_files(cls, files: Sequence[Any], **_: Any) -> Any:
        """Read pictures of single digits, bright on dark, in any size, for predictions: with the part `images`."""
        images: Any = DATASET_REGISTRY.get("ImageFiles")
        return images.from_files(files, size=[8, 8], channels=1)

    def __len__(self) -> int:
        return len(self.labels)

    def sample_ids(self) -> list[tuple[str, int]]:
        """Return the indices of these digits in the file; train, val and eval should have none in common."""
        return [("digits", int(number)) for number in self.numbers]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `image` (1, 8, 8), float in 0..1, and `label`, int64 scalar."""
        image = self.images[index]
        if self.shift:
            image = _shift(image, self.shift)
        return {"image": image, "label": self.labels[index]}


def _shift(image: Tensor, limit: int) -> Tensor:
    height, width = image.shape[-2:]
    dy, dx = torch.randint(-limit, limit + 1, (2,)).tolist()
    padded = torch.nn.functional.pad(image, (limit, limit, limit, limit))
    return padded[..., limit + dy : limit + dy + height, limit + dx : limit + dx + width]
