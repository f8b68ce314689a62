"""Time per step of the rendered project's trainer, all default features on, against a bare PyTorch loop.

The same model (an MLP 32-64-10), optimizer (SGD), batch (64) and loader on both sides; segments of the two alternate
within one process, and the ratio is that of their medians. Run:  python bench/loop.py [--segments N] [--steps N]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import train  # noqa: E402
from common.config import resolve  # noqa: E402
from common.data.loader import Step, TrainStream  # noqa: E402
from common.dist import Rank  # noqa: E402
from common.period import Position  # noqa: E402
from common.run import RunFolder  # noqa: E402
from common.session import Start, session  # noqa: E402
from common.trainer import Trainer  # noqa: E402
from custom.config import Config  # noqa: E402

SAMPLES, FEATURES, CLASSES, BATCH = 6400, 32, 10, 64


class Mlp(nn.Module):
    """32-64-10."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class Points:
    """Random features with random labels: learning is not the point here."""

    random = False

    def __init__(self, data_dir: Path, mode: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}
