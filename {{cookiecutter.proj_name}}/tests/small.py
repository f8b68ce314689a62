"""Small models, losses and datasets that tests name by their import path, `tests.small.X`."""

import os
import random
import sys
import time
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.samples import Digits


class Plain(nn.Module):
    """No batch norm and no dropout: its gradient is the mean over samples, however they are batched."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class Block(nn.Module):
    """A residual block with dropout, called with a keyword argument. `batch`: batch norm instead of layer norm."""

    def __init__(self, width: int, batch: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(width) if batch else nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.dropout(torch.tanh(self.layer(self.norm(x))))


class Tower(nn.Module):
    """Blocks one above the other, as in a transformer: what is frozen, compiled, recomputed and sharded by pattern."""

    def __init__(self, width: int = 12, depth: int = 3, batch: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        self.layers = nn.ModuleList(Block(width, batch) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


class Spare(Plain):
    """A layer that is never used, and one that only the first rank uses."""

    def __init__(self, first_only: bool = False) -> None:
        super().__init__()
        self.first_only = first_only
        self.spare = nn.Linear(10, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits = super().forward(image)
        first = os.environ.get("RANK", "0") == "0"
        return self.spare(logits) if self.first_only and first else logits


class Narrow(Plain):
    """Refuses to compute in anything but bfloat16 weights without autocast."""

    def forward(self, image: Tensor) -> Tensor:
        seen = (self.layers[1].weight.dtype, image.dtype, torch.is_autocast_enabled("cpu"))
        assert seen == (torch.bfloat16, torch.bfloat16, False), seen
        return super().forward(image)


class NotANumber:
    """A loss that breaks at a chosen call."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.calls = 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        loss = nn.functional.cross_entropy(output["logits"], batch["label"])
        return loss * float("nan") if self.calls > self.after else loss


class NanGradient:
    """A loss that stays finite at a chosen call, or `always` from it on, while its gradient does not."""

    def __init__(self, at: int, always: bool = False) -> None:
        self.at, self.always = at, always
        self.calls = 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        loss = nn.functional.cross_entropy(output["logits"], batch["label"])
        # The square root of 0 is 0, and its slope infinite.
        is_bad = self.calls == self.at or (self.always and self.calls > self.at)
        return loss + (output["logits"].sum() * 0).sqrt() if is_bad else loss


class Signalled:
    """A loss that sends its process a signal, as a person or a scheduler would.

    The environment names the call, the signal, and optionally "eval" (calls of evaluations count, not of training)
    and the rank.
    """

    compares_samples = True  # so that the look at a loss before training does not call it

    def __init__(self) -> None:
        at, number, *more = os.environ.get("SIGNAL_AT", "0 2").split()
        self.at, self.number, self.training = int(at), int(number), "eval" not in more
        self.calls = 0
        if more[1:] and os.environ["RANK"] != more[1]:
            self.at = 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled() == self.training:
            self.calls += 1
            if self.calls == self.at:
                os.kill(os.getpid(), self.number)
        return nn.functional.cross_entropy(output["logits"], batch["label"])


class Killed(BaseException):
    """Ends a run as a kill would: nothing in the program knows of it, so nothing is saved on the way out."""


class Mortal:
    """Cross entropy that ends the run at the training call that the environment names (the config must not change)."""

    def __init__(self) -> None:
        self.at = int(os.environ.get("MORTAL_AT", "0"))
        self.calls = 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        if torch.is_grad_enabled() and self.calls == self.at:
            raise Killed
        return nn.functional.cross_entropy(output["logits"], batch["label"])


class NoisyDigits(Digits):
    """Augmentation by all three global generators."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.random = True

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        scale = 1 + 0.1 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
        return {**item, "image": item["image"] * scale}


class Empty:
    """A dataset with nothing in it."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError


def two_parts(output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a loss of two parts, called `(output, batch)`."""
    loss = nn.functional.cross_entropy(output["logits"], batch["label"])
    return {"entropy": loss, "size": output["logits"].square().mean()}


def stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a collate function of one's own."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]} | {"own": torch.ones(len(items))}


class Graph:
    """A batch of its own kind, which moves and pins itself."""

    def __init__(self, **parts: Tensor) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def to(self, device: torch.device) -> "Graph":
        return Graph(**{name: value.to(device) for name, value in self.parts.items()})


def as_mapping(items: list[dict[str, Tensor]]) -> UserDict[str, Tensor]:
    """Return a mapping that is no dict, as the tokenizers of texts give."""
    return UserDict(stack(items))


def as_object(items: list[dict[str, Tensor]]) -> Graph:
    """Return a batch that is nothing but an object."""
    return Graph(**stack(items))


def time_first(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch whose first tensor does not begin with the samples."""
    return {"times": torch.zeros(7, len(items)), **stack(items)}


class DiesOnce:
    """Cross entropy that ends rank 1 in its 12th training call as a kill would, in the first of all runs.

    With `node`, its launcher too, as a machine that loses its power does.
    """

    def __init__(self, node: bool = False) -> None:
        self.node = node
        self.calls = 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        marker = Path(os.environ["DIES_ONCE"])
        if self.calls == 12 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            if self.node:
                os.kill(os.getppid(), 9)
            os.kill(os.getpid(), 9)
        return nn.functional.cross_entropy(output["logits"], batch["label"])


class Breaks(Plain):
    """A model that goes wrong on one rank, in one call of one kind, in the way that the environment names."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, image: Tensor) -> Tensor:
        how, rank, phase, number = os.environ.get("BREAKS", "never 0 train 0").split()
        self.calls += self.training == (phase == "train")
        if self.calls == int(number) and os.environ.get("RANK", "0") == rank and self.training == (phase == "train"):
            go_wrong(how)
        return super().forward(image)


def go_wrong(how: str) -> None:
    """End, or continue wrongly, in one of many ways. A file that the environment names then tells when that was."""
    if "BROKE" in os.environ:
        Path(os.environ["BROKE"]).touch()
    if how == "raise":
        raise RuntimeError("a mistake in the model")
    if how == "exit":
        os._exit(0)
    if how == "exit3":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "memory":
        torch.empty(1 << 62, dtype=torch.uint8)
    if how == "memory_of_CUDA":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if how == "abort":
        os.abort()
    if how == "barrier":
        torch.distributed.barrier()
    if how == "hang":
        time.sleep(1000)


class DrawnDigits(Digits):
    """Its constructor draws, by all three global generators."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.scale = 1 + random.random() + float(np.random.rand()) + float(torch.rand(()))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "image": item["image"] / self.scale}


class OneBadSample(Digits):
    """One sample of it cannot be read."""

    def __init__(self, data_dir: Path, mode: str, index: int) -> None:
        super().__init__(data_dir, mode)
        self.index = index

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.index:
            raise OSError("no such picture")
        return super().__getitem__(index)


class NanOnRank1(NotANumber):
    """Cross entropy that breaks in the third step, on one rank; the first two calls are for nothing."""

    def __init__(self) -> None:
        super().__init__(after=4 if os.environ.get("RANK") == "1" else 10**9)


class Learned(nn.Module):
    """Cross entropy of the logits after a layer of its own; counts its training calls, and is as mortal as `Mortal`."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.register_buffer("calls", torch.zeros(()))
        self.mortal = Mortal()

    def forward(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        if self.training:
            self.calls += 1
        return self.mortal({"logits": self.layer(output["logits"])}, batch)


class Stack(nn.Sequential):
    """A model that is nothing but its layers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


class Deep(nn.Module):
    """`Tower` without dropout: its gradient is the mean over samples, however they are batched."""

    def __init__(self) -> None:
        super().__init__()
        tower = Tower()
        self.stem, self.layers, self.head = tower.stem, tower.layers, tower.head

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer in self.layers:
            layer.dropout.p = 0.0
            x = layer(x, scale=0.5)
        return self.head(x)
