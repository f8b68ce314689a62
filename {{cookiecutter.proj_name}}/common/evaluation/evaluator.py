"""The evaluation of training and of `evaluate.py`: each sample once, the same digits on any number of ranks."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.base.context import error_context
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
    """The results on a split, one per set by name; a single set is called ""."""

    sets: dict[str, SetResult]

    @property
    def values(self) -> dict[str, float]:
        """All values: `loss`, or `name.loss` of a set with a name."""
        found = ((name, key, value) for name, one in self.sets.items() for key, value in one.values.items())
        return {f"{name}.{key}" if name else key: value for name, key, value in found}

    @property
    def samples(self) -> int | dict[str, int]:
        """Samples seen; per set if sets have names."""
        counts = {name: one.samples for name, one in self.sets.items()}
        return counts.get("", counts)


@dataclass
class EvaluationInterrupted(Exception):
    """Signal `number` arrived on some process, so all processes left the evaluation."""

    number: int


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model without wrappers (with DDP's, a process without samples would hang the others).

    Args:
        lockstep_forward: whether every forward pass needs all processes (FSDP). A process with fewer batches then keeps
            computing, with the results discarded, until all are done.
        stop_signal: the number of the stop signal that this process received, 0 for none. An evaluation may take longer
            than the grace period after a signal, so this is checked between batches; with `lockstep_forward` only after
            the last one.
    """

    task: "Task"
    rank: Rank
    precision: Precision
    lockstep_forward: bool = False
    stop_signal: Callable[[], int] = lambda: 0

    def run(self, model: nn.Module, loaders: Sequence[EvaluationLoader], *, max_pictures: int = 0) -> SplitResult:
        """Evaluate `model` on the sets of a split, one after the other. Every process must call this."""
        return SplitResult({loader.name: self.run_one(model, loader, max_pictures) for loader in loaders})

    @torch.no_grad()
    def run_one(self, model: nn.Module, loader: EvaluationLoader, max_pictures: int = 0) -> SetResult:
        """Evaluate `model` on all of `loader`'s data, over all processes, which synchronize only at the end.

        Raises:
            EvaluationInterrupted: a process received a stop signal.
        """
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
                metrics.update(output, batch, indices)
                if len(pictures) < max_pictures:
                    pictures += self.task.pictures(output, batch, max_pictures - len(pictures))
                done += 1
                if not self.lockstep_forward and self.stop_signal():
                    break
            for _ in range(idle):
                with self.precision.autocast():
                    self.task.forward(model, self._prepare(loader.sample_batch()))
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
    _, indices = loader.keys[done]
    batch, batches = indices[0] // loader.batch_size + 1, -(-loader.size // loader.batch_size)
    return f"{where}, batch {batch} of {batches}, samples {indices[0]} to {indices[-1]}"


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
    for file in folder.glob("error_rank*.txt"):  # of an earlier attempt
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
