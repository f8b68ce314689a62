"""Transforms of samples: the entries of `transforms` in a dataset's section.

A transform is any callable. It gets the part of the sample that `key` names, by default `image`, and returns a new one.
One with `whole_sample = True` is called as `transform(sample, key)`. One that draws no random numbers may say so with
`random = False`, which saves seeding.
"""

from collections.abc import Mapping
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

    whole_sample, random = True, False

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, sample: Any, key: str | None) -> dict[str, Any]:
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
        pixels = np.asarray(image) if not isinstance(image, Tensor) else None
        if pixels is None or pixels.dtype != np.uint8:
            kind = type(image).__name__ if pixels is None else f"numbers of type {pixels.dtype}"
            raise UserError(f"ToFloat: got a {kind}; it takes Pillow images and arrays of 8-bit numbers (uint8)")
        pixels = pixels.astype(np.float32) / 255
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()


@TRANSFORM_REGISTRY.register()
class Normalize:
    """Computes (image - mean) / std per channel, in the image's units; pictures still show the original colours.

    The sample keeps both numbers, as `image_mean` and `image_std` (C, 1, 1); `original` needs them.
    """

    whole_sample, random = True, False

    def __init__(self, mean: list[float], std: list[float]) -> None:
        if len(mean) != len(std) or not min(std, default=0) > 0:
            raise UserError(f"Normalize: mean {mean} and std {std} need one number per channel, and std more than 0")
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, sample: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        if key is None or key not in sample:
            raise UserError(f"Normalize: a sample has no {key!r}; key must be one of {', '.join(map(str, sample))}")
        image = sample[key]
        if len(image) != len(self.mean):
            raise UserError(f"Normalize: {key} has {len(image)} channels, but mean has {len(self.mean)}")
        scale = {f"{key}_mean": self.mean, f"{key}_std": self.std}
        return {**sample, **scale, key: (image - self.mean) / self.std}
