"""Images in folders, one for each class."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.config.registry import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class Pages:
    """Arrays (8, 8), 0..1, from files `<folder>/<class>/<name>.npy`."""

    random = False

    def __init__(self, data_dir: Path, mode: str, folder: str) -> None:
        root = data_dir / folder
        self.files = [Path(at, name) for at, _, names in sorted(os.walk(root)) for name in sorted(names)]
        names = sorted({file.parent.name for file in self.files})
        self.numbers = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `image` (1, 8, 8), float, and `label`, int64 scalar."""
        file = self.files[index]
        image = torch.from_numpy(np.load(file)).unsqueeze(0)
        return {"image": image, "label": torch.tensor(self.numbers[file.parent.name])}
