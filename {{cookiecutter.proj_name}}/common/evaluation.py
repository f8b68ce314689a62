"""One way to evaluate, for training and for `evaluate.py`: every sample once, sums and counts, one reduction."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.data.loader import EvaluationLoader
from common.dist import Rank, gather_objects, max_over_ranks
from common.errors import UserError
from common.files import write_text
from common.monitor.pictures import Picture, save_png
from common.optim.precision import Precision
from common.task import Task


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one pass.

    Attributes:
        values: `loss` (the weighted sum), each loss part and each metric by name; the same on every process.
        samples: samples seen, over all processes.
        pictures: of this process' first samples.
    """

    values: dict[str, float]
    samples: int
    pictures: list[Picture] = field(default_factory=list)


class Evaluator:
    """Evaluates a bare model (never a DDP wrapper: a process without samples would hang the others).

    Args:
        in_step: whether every forward pass needs all processes (FSDP). One with fewer batches then goes on computing,
            for nothing, until all are done.
    """

    def __init__(self, task: Task, rank: Rank, precision: Precision, *, in_step: bool = False) -> None:
        self.task = task
        self.rank = rank
        self.precision = precision
        self.in_step = in_step

    @torch.no_grad()
    def run(self, model: nn.Module, loader: EvaluationLoader, *, max_pictures: int = 0) -> Evaluation:
        """Evaluate `model` on all of `loader`'s data, over all processes.

        Raises:
            UserError: the data set is empty.
        """
        if loader.size == 0:
            raise UserError(f"cannot evaluate: {type(loader.dataset).__name__} has no samples")
        sums: dict[str, Tensor] = {}
        metrics = self.task.metric.start()
        pictures: list[Picture] = []
        count = 0
        # Before the first: who waits for an answer cannot take part in a forward pass.
        idle = max_over_ranks(loader.batches, self.rank) - loader.batches if self.in_step else 0
        with evaluation_mode(model):
            for batch in loader:
                batch = self.task.prepare_batch(self.precision.cast_batch(batch), self.rank.device)
                with self.precision.autocast():
                    output = self.task.forward(model, batch)
                    losses = self.task.losses(output, batch)
                samples = self.task.batch_size(batch)
                for name in ("sum", *losses["names"]):
                    value = losses[name].detach().double() * samples
                    sums[name] = sums[name] + value if name in sums else value
                count += samples
                output = self.task.post_process(output, batch)
                metrics.update(output, batch)
                if len(pictures) < max_pictures:
                    pictures += self.task.pictures(output, batch, max_pictures - len(pictures))
            for _ in range(idle):
                batch = self.task.prepare_batch(self.precision.cast_batch(loader.sample_batch()), self.rank.device)
                with self.precision.autocast():
                    self.task.forward(model, batch)
        values, total = self._means(sums, count)
        return Evaluation(values | metrics.compute(self.rank), total, pictures)

    def _means(self, sums: dict[str, Tensor], count: int) -> tuple[dict[str, float], int]:
        """Sums over all processes, divided by the count over all processes. One exchange, added in rank order."""
        mine = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
        shares = gather_objects((mine, count), self.rank)
        total = sum(samples for _, samples in shares)
        names = list(dict.fromkeys(name for share, _ in shares for name in share))
        means = {name: math.fsum(share.get(name, 0.0) for share, _ in shares) / total for name in names}
        return {"loss": means.pop("sum"), **means}, total


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode; afterwards each is as it was (a frozen part stays frozen)."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def write_evaluation(folder: Path, result: Evaluation, **about: Any) -> None:
    """Leave `metrics.json` (full precision) and one PNG per picture in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**about, "samples": result.samples, "values": result.values}
    write_text(folder / "metrics.json", json.dumps(record, indent=2) + "\n")
    for number, picture in enumerate(result.pictures):
        save_png(folder / f"{picture.name or f'{number:02}'}.png", picture.image)


def table(result: Evaluation) -> str:
    """The values, one line each, with every digit there is."""
    width = max(map(len, ["samples", *result.values]))
    rows = [f"  {name:<{width}}  {value!r}" for name, value in result.values.items()]
    return "\n".join([f"  {'samples':<{width}}  {result.samples}", *rows])
