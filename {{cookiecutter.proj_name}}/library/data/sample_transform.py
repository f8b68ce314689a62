"""Transforms of samples: the entries of `transforms` in a dataset's section.

A transform is any callable. It gets the part of the sample that `key` names, by default `image`, and returns a new one.
A sample that is no dict is given whole. One that draws no random numbers may say so with `random = False`, which saves
seeding.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.base.errors import UserError
from common.config.registry import TRANSFORM_REGISTRY


@TRANSFORM_REGISTRY.register()
class Named:
    """Turns a tuple, the sample of most torchvision datasets, into a dict: `names: [image, label]`."""

    random = False

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, sample: Any) -> dict[str, Any]:
        if len(sample) != len(self.names):
            raise UserError(f"Named: a sample has {len(sample)} parts, but names: {self.names} has {len(self.names)}")
        return dict(zip(self.names, sample, strict=True))


@TRANSFORM_REGISTRY.register()
class ToFloat:
    """Converts a Pillow image, or an 8-bit array (H, W) or (H, W, C), to a tensor (C, H, W), float in 0..1."""

    random = False

    def __call__(self, image: Any) -> Tensor:
        if isinstance(image, Image.Image) and image.mode not in ("L", "RGB", "RGBA"):
            image = image.convert("RGB")
        if not isinstance(image, (Image.Image, np.ndarray)):
            raise UserError(f"ToFloat: got a {type(image).__name__}; it takes Pillow images and 8-bit arrays")
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8:
            raise UserError(f"ToFloat: got numbers of type {pixels.dtype}; it takes 8-bit numbers (uint8)")
        pixels = pixels.astype(np.float32) / 255
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()


@TRANSFORM_REGISTRY.register()
class Normalize:
    """Computes (image - mean) / std per channel, in the image's units."""

    random = False

    def __init__(self, mean: list[float], std: list[float]) -> None:
        if len(mean) != len(std) or not min(std, default=0) > 0:
            raise UserError(f"Normalize: mean {mean} and std {std} need one number per channel, and std more than 0")
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image: Tensor) -> Tensor:
        if len(image) != len(self.mean):
            raise UserError(f"Normalize: the image has {len(image)} channels, but mean has {len(self.mean)}")
        return (image - self.mean) / self.std
