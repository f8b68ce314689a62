"""An optimizer step with the same bits on any number of processes: `dist.reduction: fixed`, see docs/reduction.md.

A step's micro-batches are the same samples on any number of processes. Each is computed by itself: with random draws of
its own, from the buffers as they were before. What comes of it, gradients and changes of buffers, is added along a
fixed tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from common.base.errors import UserError
from common.checkpoint.checksum import state_checksum
from common.data.keyed import seed_all
from common.data.loader import Step
from common.distributed import check_same, sum_over_ranks
from common.distributed.buffers import named_buffers
from common.distributed.seed import mix
from common.distributed.tree import TreeSum, leaves_here, sum_branches
from common.progress import Position
from common.settings import RunConfig
from common.step import OptimizerStep, TaskUpdate

_DRAWS = 3  # distinguishes the keys of micro-batches from those of data


class FixedStep(OptimizerStep):
    """Takes one step for every update, with gradients summed along a tree over the micro-batches of all processes.

    Running statistics of norms change by the mean of their changes by each micro-batch, weighted by samples; buffers
    declared as `sum` by their sum. Batches may change no other buffers.

    Args:
        seed: of the run.
        arguments: those of an `OptimizerStep`.

    Attributes:
        changing: the buffers that batches may change, by name: module, name there, whether it belongs to a norm.

    Raises:
        UserError: the run cannot have the same bits on any number of processes, and why.
    """

    in_parts = True

    def __init__(self, config: RunConfig, seed: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seed, self.bucket_mb, self.buffers = seed, config.dist.bucket_mb, None
        self._here, self._tree = leaves_here(config.optim.accumulate, self.rank), TreeSum()
        self.changing = {
            name: (module, own, isinstance(module, _NormBase))
            for name, module, own, _ in named_buffers(self.task)
            if isinstance(module, _NormBase) or name in self.declared
        }
        on_gpu = self.rank.device.type != "cpu"
        refused = {
            "dist.strategy fsdp, which computes with parts of the model": config.dist.strategy == "fsdp",
            "dist.sync_bn, whose statistics are of one micro-batch per process": config.dist.sync_bn,
            "prepare.compile, whose code depends on the shapes that a process saw": config.prepare.compile.enabled,
            "an optimizer that calls a closure": self.needs_closure,
            "a stream, dealt out to the processes: the data set needs __len__ and __getitem__": self.sample is None,
            "buffers declared as gather or rank": not {*self.declared.values()} <= {"sum"},
            "a GPU without dist.deterministic strict": on_gpu and config.dist.deterministic != "strict",
        }
        if reasons := [reason for reason, is_so in refused.items() if is_so]:
            raise UserError(f"dist.reduction fixed does not go with {'; nor with '.join(reasons)}")
        weights = {name: state_checksum(each) for name, each in self.task.state_dict().items()}
        check_same(weights, self.rank, "has other weights than rank 0; checksums")

    def __call__(self, step: Step, at: Position) -> bool:
        self._samples = step.global_batch.samples
        self.draw(at.step, "", 0)  # what the task draws before its first micro-batch
        return super().__call__(step, at)

    def gradients(
        self, update: TaskUpdate, step: Step, weights: Sequence[tuple[float, int]], at: Position
    ) -> Tensor | None:
        # In a sum over processes, not an average. Dividing by a power of two rounds nothing.
        weights = [(weight / self.rank.world_size, count) for weight, count in weights]
        self._step, self._before, self._number = at.step, [each.clone() for each in self.buffers_now()], 0
        self._used = torch.zeros(len(update.trained), dtype=torch.int32)
        return super().gradients(update, step, weights, at)

    @contextmanager
    def _part(self, update: TaskUpdate, is_last: bool, size: int) -> Iterator[None]:
        """Compute a micro-batch within this context; after this process' last one, set the gradients of the step."""
        self.set_buffers(self._before)
        self.draw(self._step, update.name, self.rank.rank * self._here + self._number)
        yield
        share, kinds, trained = size / self._samples, self.changing.values(), update.trained
        changes = [now - before for now, before in zip(self.buffers_now(), self._before, strict=True)]
        changes = [each * share if is_norm else each for each, (*_, is_norm) in zip(changes, kinds, strict=True)]
        terms = [*((each.grad, each) for each in trained), *((each, each) for each in changes)]
        # -0.0 is the number that changes no other when added: 0.0 would change -0.0.
        leaf = [term if size and term is not None else torch.zeros_like(like).neg_() for term, like in terms]
        self._tree.add(leaf)
        self._used += torch.tensor([size > 0 and each.grad is not None for each in trained])
        self._number += 1
        for parameter in trained:
            parameter.grad = None
        if is_last:
            for _ in range(self._number, self._here):  # an epoch's last step
                self._tree.add([torch.zeros_like(each).neg_() for each in leaf])
            self._finish(update)

    def _finish(self, update: TaskUpdate) -> None:
        """Set gradients and buffers to what all micro-batches of all processes have given."""
        sums = self._tree.result()
        sum_branches(sums, self.rank, self.bucket_mb)
        used = sum_over_ranks(self._used, self.rank).tolist()
        for parameter, gradient, count in zip(update.trained, sums, used, strict=False):
            parameter.grad = gradient if count else None
        changed = zip(self._before, sums[len(used) :], strict=True)
        # A norm counts its batches in whole numbers: one per step.
        self.set_buffers([old + (by if old.is_floating_point() else by.round().to(old.dtype)) for old, by in changed])
        self.draw(self._step, update.name, -1)  # for the optimizer and `after_step`

    def draw(self, step: int, update: str, number: int) -> None:
        """Seed all random streams of this process for a micro-batch, numbered over all processes."""
        seed_all(seed := mix(self.seed, _DRAWS, step, crc32(update.encode()), number))
        if self.rank.device.type != "cpu":
            torch.get_device_module(self.rank.device).manual_seed(seed)

    def buffers_now(self) -> list[Tensor]:
        """Return those of `changing` (not copies)."""
        return [getattr(module, own).detach() for module, own, _ in self.changing.values()]

    def set_buffers(self, values: Sequence[Tensor]) -> None:
        """Set those of `changing`."""
        for buffer, value in zip(self.buffers_now(), values, strict=True):
            buffer.copy_(value)
