"""One way to evaluate, for training and for `evaluate.py`: each sample once, the same digits on any number of ranks."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.base.context import error_context
from common.base.errors import UserError
from common.base.files import write_text
from common.data.loader import EvaluationLoader
from common.data.sets import label
from common.distributed import Rank, max_over_ranks
from common.evaluation.loss import LossSums
from common.monitor.pictures import Picture, save_png
from common.monitor.writer import plain
from common.optim.precision import Precision

if TYPE_CHECKING:
    from common.task import Task


@dataclass(frozen=True)
class SetResult:
    """The outcome of one pass over one set.

    Attributes:
        values: `loss` (the weighted sum), each loss part and each metric by name; the same on every process.
        samples: samples seen, over all processes.
        pictures: of this process' first samples.
    """

    values: dict[str, float]
    samples: int
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class SplitResult:
    """The outcome on a split: of each of its sets by name, a single one being called ""."""

    sets: dict[str, SetResult]

    @property
    def values(self) -> dict[str, float]:
        """All values: `loss`, or `name.loss` of a set with a name."""
        found = ((name, key, value) for name, one in self.sets.items() for key, value in one.values.items())
        return {f"{name}.{key}" if name else key: value for name, key, value in found}

    @property
    def samples(self) -> int | dict[str, int]:
        """Samples seen; where sets have names, of each."""
        counts = {name: one.samples for name, one in self.sets.items()}
        return counts.get("", counts)


class EvaluationInterrupted(Exception):
    """Signal `number` arrived on some process, so all processes left the evaluation."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Evaluator:
    """Evaluates a bare model (never a DDP wrapper: a process without samples would hang the others).

    Args:
        lockstep_forward: whether every forward pass needs all processes (FSDP). A process with fewer batches then keeps
            computing, with the results discarded, until all are done.
        stop_signal: the number of the signal that asked this process to stop, 0 for none. An evaluation may take longer
            than the grace period after a signal, so this is checked between batches; with `lockstep_forward` only after
            the last one.
    """

    def __init__(
        self,
        task: "Task",
        rank: Rank,
        precision: Precision,
        *,
        lockstep_forward: bool = False,
        stop_signal: Callable[[], int] = lambda: 0,
    ) -> None:
        self.task = task
        self.stop_signal = stop_signal
        self.rank = rank
        self.precision = precision
        self.lockstep_forward = lockstep_forward

    def run(self, model: nn.Module, loaders: Sequence[EvaluationLoader], *, max_pictures: int = 0) -> SplitResult:
        """Evaluate `model` on the sets of a split, one after the other. Every process must call this."""
        return SplitResult({loader.name: self.run_one(model, loader, max_pictures) for loader in loaders})

    @torch.no_grad()
    def run_one(self, model: nn.Module, loader: EvaluationLoader, max_pictures: int = 0) -> SetResult:
        """Evaluate `model` on all of `loader`'s data, over all processes, which meet only at the end.

        Raises:
            UserError: the data set is empty.
            EvaluationInterrupted: a process was asked to stop.
        """
        if loader.size == 0:
            raise UserError(f"cannot evaluate: {type(loader.dataset).__name__} has no samples")
        sums, metrics = LossSums(), self.task.metric.start()
        pictures: list[Picture] = []
        done = 0  # batches
        # Before the first batch: a process that waits in a collective cannot take part in a forward pass.
        idle = max_over_ranks(len(loader.keys), self.rank) - len(loader.keys) if self.lockstep_forward else 0
        with evaluation_mode(model), error_context(lambda: _where(loader, done)):
            for batch, (_, indices) in zip(loader, loader.keys, strict=True):
                batch = self._prepare(batch)
                with self.precision.autocast():
                    output = self.task.forward(model, batch)
                    losses = self.task.losses(output, batch)
                sums.add(losses, len(indices))
                output = self.task.post_process(output, batch)
                metrics.update(output, batch, first=indices[0])
                if len(pictures) < max_pictures:
                    pictures += self.task.pictures(output, batch, max_pictures - len(pictures))
                done += 1
                if not self.lockstep_forward and self.stop_signal():
                    break
            for _ in range(idle):
                batch = self._prepare(loader.sample_batch())
                with self.precision.autocast():
                    self.task.forward(model, batch)
            if number := max_over_ranks(self.stop_signal(), self.rank):
                raise EvaluationInterrupted(number)
            values, samples = sums.means(self.rank)
            return SetResult(values | metrics.compute(self.rank), samples, pictures)

    @torch.no_grad()
    def pictures(self, model: nn.Module, batch: Any, limit: int) -> list[Picture]:
        """Up to `limit` pictures of a loaded batch."""
        batch = self._prepare(batch)
        with evaluation_mode(model), self.precision.autocast():
            output = self.task.post_process(self.task.forward(model, batch), batch)
            return self.task.pictures(output, batch, limit)

    def _prepare(self, batch: Any) -> Any:
        return self.task.prepare_batch(self.precision.cast_batch(batch), self.rank.device)


def _where(loader: EvaluationLoader, done: int) -> str:
    """For error messages: the batch after the `done` first ones, numbered over all processes."""
    where = f"in the evaluation on {label(loader.split, loader.name)}"
    if done == len(loader.keys):
        return f"{where}, after the last batch"
    first, last = loader.keys[done][1][0], loader.keys[done][1][-1]
    batch, batches = first // loader.batch_size + 1, -(-loader.size // loader.batch_size)
    return f"{where}, batch {batch} of {batches}, samples {first} to {last}"


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


def write_evaluation(folder: Path, result: SplitResult, **about: Any) -> None:
    """Write `metrics.json` (full precision) and one PNG per picture to `folder`; named sets get a folder each."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("error_rank*.txt"):  # of an attempt before this one
        file.unlink(missing_ok=True)
    record = {**about, "samples": result.samples, "values": result.values}
    write_text(folder / "metrics.json", json.dumps(plain(record), indent=2, allow_nan=False) + "\n")
    for name, one in result.sets.items():
        for number, picture in enumerate(one.pictures):
            save_png(folder / name / f"{picture.name or f'{number:02}'}.png", picture.image)


def table(result: SetResult) -> str:
    """The values, one line each, with all their digits."""
    width = max(map(len, ["samples", *result.values]))
    rows = [f"  {name:<{width}}  {value!r}" for name, value in result.values.items()]
    return "\n".join([f"  {'samples':<{width}}  {result.samples}", *rows])
