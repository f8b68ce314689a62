"""Digits with noise for a generator."""

from pathlib import Path

import torch
from torch import Tensor

from examples.digits import load_digits


class DigitsWithNoise:
    """A real digit, its class, and the noise from which the generator makes another digit of that class.

    The noise is drawn here, not in the task: the loader seeds every sample by (seed, epoch, index), so it is the same
    on any number of processes and after a resume.

    Args:
        noise: numbers per sample.
    """

    random = True

    def __init__(self, data_dir: Path, mode: str, noise: int = 16) -> None:
        self.images, self.labels = load_digits(data_dir, mode)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`image` (1, 8, 8), float in 0..1; `label`, int64 scalar; `noise` (noise,), normal."""
        return {"image": self.images[index], "label": self.labels[index], "noise": torch.randn(self.noise)}
