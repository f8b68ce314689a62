"""What the runs on a device are made of: models, a dataset, and a plugin that notes what torch says at the end."""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data.loader import Step
from common.distributed import Rank
from common.progress import Position
from common.step import OptimizerStep
from common.trainer import Trainer
from tests.samples import Digits
from custom.datasets.digits_dataset import DigitsDataset


class Net(nn.Module):
    """Convolution, batch norm and dropout, all of which have a deterministic version on a GPU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(16 * width, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.features(image))


class Undetermined(Net):
    """Uses an operation that has no deterministic version on any device."""

    def forward(self, image: Tensor) -> Tensor:
        first = torch.zeros(1, dtype=torch.long, device=image.device)
        return super().forward(image.clone().put_(first, image.new_zeros(1)))


class Greedy(Net):
    """Asks for more memory than any device has."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + image.new_empty(1 << 50).sum()


class Layers(nn.Module):
    """Layers whose activations are most of what a step takes in memory."""

    def __init__(self, depth: int = 16, width: int = 512) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class WrongLabel(DigitsDataset):
    """One label is no class of the model."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {**item, "label": torch.tensor(12)} if index == 77 else item


class Many(Digits):
    """The digits, again and again: enough samples for steps of thousands."""

    def __len__(self) -> int:
        return 1 << 15

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index % super().__len__())


def take_notes(trainer: Trainer) -> None:
    """Write down, when training ends, what carried the exchanges and what the compiler and its graphs did."""
    finish = trainer.finish
    if "REFUSE_WAITS" in os.environ:
        _refuse_waits(trainer)

    def noted() -> Any:
        outcome = finish()
        if trainer.rank.is_main:
            Path(trainer.paths.root, "notes.json").write_text(json.dumps(_notes(trainer.rank, trainer.paths.root)))
        return outcome

    vars(trainer)["finish"] = noted


def _notes(rank: Rank, folder: Path) -> dict[str, Any]:
    # Importing these takes seconds, which runs that compile nothing are spared.
    dynamo, trees = (sys.modules.get(f"torch.{name}") for name in ("_dynamo.utils", "_inductor.cudagraph_trees"))
    counters = dynamo.counters if dynamo is not None else defaultdict[str, dict[str, int]](dict)
    notes: dict[str, Any] = {
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "processes": rank.world_size,
        "graph breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"].get("unique_graphs", 0),
        "cuda graphs skipped": counters["inductor"].get("cudagraph_skips", 0),
    }
    if rank.device.type == "cuda":
        index = torch.cuda.current_device()
        manager = None if trees is None else trees.get_manager(index, create_if_none_exists=False)
        notes["cuda graphs"] = 0 if manager is None else len(manager.roots)
        notes["accelerator"] = [str(torch.accelerator.current_accelerator()), torch.accelerator.current_device_index()]
        peaks = torch.accelerator.max_memory_allocated(index), torch.cuda.max_memory_allocated(index)
        notes["peaks"] = [*peaks, torch.cuda.max_memory_reserved(index)]
    return notes


def _refuse_waits(trainer: Trainer) -> None:
    """Let CUDA raise an error for each call within a step that waits for the device, from the fourth step on.

    The first ones start libraries, which wait.
    """
    take, is_gpu = OptimizerStep.__call__, trainer.rank.device.type == "cuda"

    def watched(self: OptimizerStep, step: Step, at: Position) -> bool:
        if at.step == 3:
            print("from here on, no step may wait", flush=True)
        if is_gpu and at.step >= 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return take(self, step, at)
        finally:
            if is_gpu:
                torch.cuda.set_sync_debug_mode("default")

    OptimizerStep.__call__ = watched  # type: ignore[method-assign]


def as_a_group() -> None:
    """Let a single process join a group of one: then all exchanges are made, by NCCL on a GPU."""
    Rank.is_single_process = property(lambda rank: False)  # type: ignore[assignment, method-assign]
