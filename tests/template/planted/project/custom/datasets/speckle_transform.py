"""Noise on images."""

import torch
from torch import Tensor

from common.config.registry import TRANSFORM_REGISTRY


@TRANSFORM_REGISTRY.register()
class Speckle:
    """Adds normal noise with the deviation `strength` to an image."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, image: Tensor) -> Tensor:
        return image + self.strength * torch.randn_like(image)
