"""The evaluation of training and of `evaluate.py`: each sample once, the same digits on any number of ranks."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from loguru import logger

from common.base.errors import UserError, error_context, with_notes
from common.base.files import write_text
from common.base.text import label, plain
from common.data.loader import EvaluationLoader, Step
from common.data.workers import WaitInterrupted
from common.distributed import Rank, max_over_ranks
from common.distributed.buffers import buffers_unchanged
from common.distributed.seed import mix, random_state_unchanged, set_seed
from common.evaluation.loss import Losses, LossSums
from common.evaluation.metric import MetricDict
from common.monitor.result import SetResult, SplitResult
from common.optim.precision import Precision
from common.task import Task

_NOT_MEASURED = (
    "best.metric: {} was not measured on this batch; available: {}. A metric gives NaN for a part that a batch lacks"
)


class Gallery(Protocol):
    """The seat `gallery`: it draws samples. Without a part that takes it, nothing is drawn.

    `begin` gives what collects the pictures of one pass over a set of `split`: `add(output, batch, indices)` after each
    batch, and `finish()` on every process.
    """

    def begin(self, task: Any, rank: Rank, split: str) -> Any: ...

    def show(self, trainer: Any, split: str, result: SplitResult) -> None: ...

    def save(self, folder: Path, result: SplitResult) -> None: ...


@dataclass
class EvaluationInterrupted(Exception):
    """Signal `number` arrived on some process, so all processes left the evaluation."""

    number: int


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a task without wrappers (with DDP's, a process without samples would hang the others).

    The random generators are seeded for each batch by the run's seed, the name of the set and the batch's first sample,
    and restored afterwards: a model that draws numbers gives the same results on any number of processes, and training
    does not depend on evaluations.

    Args:
        gallery: draws samples; None: no pictures.
        lockstep_forward: whether every forward pass needs all processes. A process with fewer batches then keeps
            computing, with the results discarded, until all are done.
        stop_signal: the number of the stop signal that this process received, 0 for none. An evaluation may take longer
            than the grace period after a signal, so this is checked between batches; with `lockstep_forward` only after
            the last one.
        after_sanity_check: functions to call with each set's first batch: its loader, the batch on the device, the
            output, the losses. Add your own.
    """

    task: Task
    rank: Rank
    precision: Precision
    gallery: Gallery | None = None
    lockstep_forward: bool = False
    stop_signal: Callable[[], int] = lambda: 0
    after_sanity_check: list[Callable[[EvaluationLoader, Any, Any, Losses], object]] = field(default_factory=list)

    def run(self, loaders: Sequence[EvaluationLoader]) -> SplitResult:
        """Evaluate on the sets of a split, one after the other. Every process must call this.

        Raises:
            EvaluationInterrupted: a process received a stop signal.
        """
        results = {}
        for loader in loaders:
            seen = _Pass(self.task, self.rank, self.gallery, loader.split)
            # Before the first batch: a process that waits in a collective cannot take part in a forward pass.
            idle = 0
            if self.lockstep_forward:
                idle = max_over_ranks(len(loader.keys), self.rank) - len(loader.keys)
            set_number = crc32(label(loader.split, loader.name).encode())
            where = partial(_where, loader, seen)
            with self.evaluating(), error_context(where):
                try:
                    for batch, (_, indices) in zip(loader, loader.keys, strict=True):
                        set_seed(mix(loader.seed, set_number, indices[0]))
                        self._add(seen, batch, indices)
                        if not self.lockstep_forward and self.stop_signal():
                            break
                except WaitInterrupted:
                    if self.lockstep_forward:  # others wait for this process
                        raise
                for _ in range(idle):
                    self.measure(loader.read_once([0]))
                number = max_over_ranks(self.stop_signal(), self.rank)
                if number:
                    raise EvaluationInterrupted(number)
                losses, samples = seen.losses.means(self.rank)
                values = losses | seen.metrics.compute()
                pictures = []
                if seen.selection:
                    pictures = seen.selection.finish()
                results[loader.name] = SetResult(values, samples, pictures)
        return SplitResult(results)

    def sanity_check(self, loaders: Sequence[EvaluationLoader], best: str = "") -> None:
        """Evaluate one batch of every set, so that mistakes in evaluation show before training, not an epoch later.

        Args:
            best: the value that decides about the best checkpoint, `set.value` of one of several sets.

        Raises:
            UserError: `best` is not measured.
        """
        for loader in loaders:
            seen = _Pass(self.task, Rank(), self.gallery)
            where = f"in trying a batch of {label(loader.split, loader.name)} before training"
            with self.evaluating(), error_context(where):
                batch = next(iter(loader), None)  # as it will be read, so workers start here
                if batch is not None:
                    indices = loader.keys[0][1]
                    batch, output, losses = self._add(seen, batch, indices)
                    if seen.selection:
                        seen.selection.finish()
                    if self.rank.is_main:
                        try:
                            of_set = f"{loader.name}.".removeprefix(".")  # "" for a single set
                            measured = [of_set + name for name in (*losses, *seen.metrics.compute())]
                            if best and best.startswith(of_set) and best not in measured:
                                raise UserError(_NOT_MEASURED.format(best, ", ".join(measured)))
                        except (UserError, NotImplementedError):
                            raise
                        except (ValueError, ArithmeticError, RuntimeError) as error:  # it may lie in so few samples
                            text = "computing metrics of the first batch alone fails: {}: {}"
                            logger.warning(text, type(error).__name__, with_notes(error))
                    for call in self.after_sanity_check:
                        call(loader, batch, output, losses)
                elif self.lockstep_forward:
                    self.measure(loader.read_once([0]))

    def metrics(self, step: Step) -> dict[str, float]:
        """Compute the metrics of a training step over all processes. Every process must call this."""
        seen = _Pass(self.task, self.rank)
        whole = step.global_batch
        with self.evaluating():
            for batch, size, weight in zip(step.batches, whole.sizes, whole.weights, strict=True):
                if weight:
                    self._add(seen, batch, range(size))
                elif self.lockstep_forward:
                    self.measure(batch)
            return seen.metrics.compute()

    def write(self, folder: Path, result: SplitResult, **about: Any) -> None:
        """Write `metrics.json` (full precision), and the pictures."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {**about, "samples": result.samples, "values": result.values}
        text = json.dumps(plain(record), indent=2, allow_nan=False)
        write_text(folder / "metrics.json", text + "\n")
        if self.gallery:
            self.gallery.save(folder, result)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; afterwards modules (frozen too), buffers and generators are as before."""
        modes = {module: module.training for module in self.task.modules()}
        with torch.no_grad(), random_state_unchanged(self.rank.device), buffers_unchanged(self.task):
            self.task.eval()
            try:
                yield
            finally:
                for module, training in modes.items():
                    module.training = training

    def measure(self, batch: Any) -> tuple[Any, Any, Losses]:
        """Run the model on a loaded batch. Returns it on the device, its output, losses."""
        batch = self.precision.cast_batch(batch)
        batch = self.task.prepare_batch(batch, self.rank.device)
        with self.precision.autocast():
            output, losses = self.task(self.task.measure, batch)
        return batch, output, losses

    def _add(
        self,
        seen: "_Pass",
        batch: Any,
        indices: Sequence[int],
    ) -> tuple[Any, Any, Losses]:
        """Add a loaded batch of the samples `indices`. Returns it as measured, with its output and losses."""
        samples = len(indices)
        count = self.task.count(batch)
        if count is None:
            count = samples
        batch, output, losses = measured = self.measure(batch)
        seen.losses.add(losses, samples, int(count))
        output = self.task.post_process(output, batch)
        seen.metrics.update(output, batch, indices)
        if seen.selection:
            seen.selection.add(output, batch, indices)
        seen.batches += 1
        return measured


class _Pass:
    """The measurements of a pass over a dataset, so far."""

    def __init__(
        self,
        task: Task,
        rank: Rank,
        gallery: Gallery | None = None,
        split: str = "",
    ) -> None:
        self.losses = LossSums()
        self.metrics = MetricDict(task.metric, rank)
        self.batches = 0
        self.selection = gallery and gallery.begin(task, rank, split)


def _where(loader: EvaluationLoader, seen: _Pass) -> str:
    """Say where a pass is, for error messages: the samples of its next batch."""
    done = seen.batches
    where = f"in the evaluation on {label(loader.split, loader.name)}"
    if done == len(loader.keys):
        return f"{where}, after the last batch"
    _, indices = loader.keys[done]
    return f"{where}, samples {indices[0]} to {indices[-1]}"
