"""The digits as a stream that is mixed in a buffer."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from common.config.registry import DATASET_REGISTRY
from custom.datasets.digits_dataset import DigitsDataset


@DATASET_REGISTRY.register()
class Strokes:
    """The first `records` digits in order; each is exchanged for one of the `buffer` digits that wait."""

    def __init__(self, data_dir: Path, mode: str, records: int, buffer: int) -> None:
        self.digits, self.records, self.size = DigitsDataset(data_dir, mode), records, buffer
        self.epoch = self.at = self.given = 0
        self.waiting = list[int]()

    def set_epoch(self, epoch: int) -> None:
        """Mix each epoch in another way."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Records with `image` (1, 8, 8), float in 0..1, and `label`, int64 scalar."""
        while self.at < self.records or self.waiting:
            if self.at < self.records:
                self.waiting.append(self.at)
                self.at += 1
            if len(self.waiting) > self.size or self.at == self.records:
                dice = random.Random(self.epoch * self.records + self.given)
                self.given += 1
                yield self.digits[self.waiting.pop(dice.randrange(len(self.waiting)))]
        self.at = self.given = 0  # the next epoch begins

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "given": self.given, "waiting": list(self.waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.given, self.waiting = state["at"], state["given"], list(state["waiting"])
