"""Measurements of a system that never settles: Lorenz' model of convection. Each follows from the one before."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Point = tuple[float, float, float]


class Measurements:
    """Training data that has no length and no index. It knows nothing of processes and workers: each record is used
    once per epoch with any number of them. `state_dict` is its position, from which a resumed run reads on.

    Args:
        records: per epoch.
        past: measurements that are given in each record; the one after them is to be predicted.
    """

    def __init__(self, data_dir: Path, mode: str, records: int, past: int = 8) -> None:
        self.records, self.past, self.start = records, past, (1.0, 1.0, 25.0)
        self.done, self.point = 0, self.start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Records of `past` (past,) and `future` (1,), float, around -2..2."""
        while self.done < self.records:
            values = []
            for _ in range(self.past + 1):
                self.point = advance(self.point)
                values.append(self.point[0] / 10)
            self.done += 1
            yield {"past": torch.tensor(values[:-1]), "future": torch.tensor(values[-1:])}
        self.done, self.point = 0, self.start  # the next epoch begins

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "point": self.point}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.point = state["done"], state["point"]


class LaterMeasurements:
    """Records from further on, as a list: evaluation needs a length and an index.

    Args:
        records: how many.
        skip: records to leave out at the beginning, at least those of the training.
    """

    random = False  # nothing is drawn, so the loader need not seed

    def __init__(self, data_dir: Path, mode: str, records: int, skip: int) -> None:
        self.kept = list(islice(Measurements(data_dir, mode, skip + records), skip, None))

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """As in `Measurements`."""
        return self.kept[index]


def advance(point: Point, time: float = 0.1, steps: int = 10) -> Point:
    """Return the system's point after `time`, by the midpoint method (Lorenz, Deterministic Nonperiodic Flow, 1963)."""
    for _ in range(steps):
        half = _move(point, _velocity(point), time / steps / 2)
        point = _move(point, _velocity(half), time / steps)
    return point


def _velocity(point: Point) -> Point:
    x, y, z = point
    return 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z


def _move(point: Point, velocity: Point, time: float) -> Point:
    return point[0] + time * velocity[0], point[1] + time * velocity[1], point[2] + time * velocity[2]
