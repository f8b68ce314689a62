"""Digits with augmentation that grows with the epochs."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from examples.digits import load_digits


class GrowingAugmentation:
    """The digits, at first as they are, then shifted and noisy: more so with every epoch, up to `until_epoch`.

    Args:
        data_dir: folder that contains `digits.npz`.
        mode: train, val or eval.
        shift: largest shift in pixels.
        noise: largest standard deviation of the noise.
        until_epoch: the epoch with the strongest augmentation, counted from 0; 0: no augmentation, as for validation.
    """

    classes = tuple("0123456789")

    def __init__(self, data_dir: Path, mode: str, shift: int = 1, noise: float = 0.1, until_epoch: int = 0) -> None:
        self.images, self.labels = load_digits(data_dir, mode)
        self.shift, self.noise, self.until_epoch = shift, noise, until_epoch
        self.strength = 0.0  # 0..1
        self.random = until_epoch > 0

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, counted from 0, in every process that reads."""
        self.strength = min(1.0, epoch / self.until_epoch) if self.until_epoch else 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`image` (1, 8, 8), float around 0..1, and `label`, int64 scalar."""
        image, shift = self.images[index], round(self.strength * self.shift)
        if self.strength:
            dy, dx = torch.randint(2 * shift + 1, (2,)).tolist()
            image = pad(image, (shift, shift, shift, shift))[:, dy : dy + 8, dx : dx + 8]
            image = image + self.strength * self.noise * torch.randn(image.shape)
        return {"image": image, "label": self.labels[index]}
