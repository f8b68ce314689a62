"""Scenes: digits of several sizes on a canvas, with their boxes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from examples.digits import SPLITS, load_digits


class Scenes:
    """One to three digits on a noisy canvas. Scene i is a function of i.

    Args:
        samples: number of scenes.
        size: height and width of the canvas, in pixels.
        sides: shortest and longest side of a digit, in pixels.
    """

    random = False  # items draw from generators of their own, so the loader need not seed

    def __init__(
        self, data_dir: Path, mode: str, samples: int = 1000, size: int = 32, sides: tuple[int, int] = (10, 16)
    ) -> None:
        self.images, self.labels = load_digits(data_dir, mode)
        self.split, self.samples, self.size, self.sides = SPLITS.index(mode), samples, size, sides

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`image` (1, H, W), float in 0..1; `boxes` (n, 4), float: x0, y0, x1, y1 in pixels; `label` (n,), int64."""
        draw = np.random.default_rng([self.split, index])
        canvas = torch.from_numpy(draw.uniform(0, 0.2, size=(1, self.size, self.size))).float()
        boxes: list[list[int]] = []
        labels: list[int] = []
        for number in draw.integers(len(self.images), size=draw.integers(1, 4)).tolist():
            side = int(draw.integers(self.sides[0], self.sides[1] + 1))
            x, y = draw.integers(self.size - side + 1, size=2).tolist()
            box = [x, y, x + side, y + side]
            if not any(_overlap(box, other) for other in boxes):
                digit = interpolate(self.images[number][None], (side, side), mode="bilinear")[0]
                canvas[:, y : y + side, x : x + side].clamp_(min=digit)
                boxes.append(box)
                labels.append(int(self.labels[number]))
        return {"image": canvas, "boxes": torch.tensor(boxes).float(), "label": torch.tensor(labels)}

    @staticmethod
    def collate(items: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Make a batch: the images stacked; boxes and labels in lists, as their number differs from scene to scene."""
        lists = {name: [item[name] for item in items] for name in ("boxes", "label")}
        return {"image": torch.stack([item["image"] for item in items]), **lists}


def _overlap(first: list[int], second: list[int]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]
