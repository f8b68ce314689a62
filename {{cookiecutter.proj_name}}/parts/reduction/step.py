"""An optimizer step with the same bits on any number of processes: docs/parts/reduction.md.

A step's micro-batches are the same samples on any number of processes. Each is computed separately: with its own random
draws, from the buffers as they were before. Its results, gradients and changes of buffers, are added along a fixed
tree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from common.base.errors import UserError
from common.checkpoint.checksum import state_checksum
from common.data.loader import Step
from common.distributed import check_same
from common.distributed.buffers import buffers_unchanged, named_buffers
from common.distributed.seed import mix, set_seed
from common.optim import needs_closure
from common.progress import Position
from common.step import OptimizerStep, TaskUpdate, Weights
from parts.reduction.tree import Branches, add_leaf, leaves_here, sum_branches

_DRAWS = 3  # distinguishes the keys of micro-batches from those of data


class FixedStep(OptimizerStep):
    """Takes one step for every update, with gradients summed along a tree over the micro-batches of all processes.

    Running statistics of norms change by the mean of their changes by each micro-batch, weighted by samples. Batches
    may change no other buffers.

    Args:
        arguments: those of an `OptimizerStep`.

    Attributes:
        changing: the buffers that batches may change, by name: their module, and their name there.

    Raises:
        UserError: the run cannot have the same bits on any number of processes, and why.
    """

    separate_micro_batches = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config = self.config
        is_stream = not self.stream.is_indexed
        self.bucket_mb = config.dist.bucket_mb
        here, rank = leaves_here(config.optim.accumulate, self.rank), self.rank.rank
        self._here = range(rank * here, (rank + 1) * here)  # the micro-batches of a step that this process computes
        self.changing = {
            name: (module, attribute)
            for name, module, attribute, buffer in named_buffers(self.task)
            if isinstance(module, _NormBase) and buffer is not None
        }
        refused = {
            "dist.sync_bn, whose statistics are of one micro-batch per process": config.dist.sync_bn,
            "prepare.compile, whose code depends on the shapes that a process saw": config.prepare.compile.enabled,
            "an optimizer that calls a closure": needs_closure(self.optimizer),
            "a stream, shared among the processes: the dataset needs __len__ and __getitem__": is_stream,
            "own_buffers, which differ between processes": bool(self.own_buffers),
            "a GPU without dist.deterministic strict": self.rank.device.type != "cpu"
            and config.dist.deterministic != "strict",
        }
        if reasons := [reason for reason, is_so in refused.items() if is_so]:
            raise UserError(f"dist.reduction fixed does not work with {'; nor with '.join(reasons)}")
        weights = {name: state_checksum(tensor) for name, tensor in self.task.state_dict().items()}
        check_same(weights, self.rank, "has weights that differ from rank 0's; checksums")

    def __call__(self, step: Step, at: Position) -> bool:
        self._samples = step.global_batch.samples
        self.draw(at.step, "", 0)  # what the task draws before its first micro-batch
        return super().__call__(step, at)

    def gradients(self, update: TaskUpdate, step: Step, weights: Weights, at: Position) -> None:
        self._step, self._numbers, self._branches = at.step, iter(self._here), Branches()
        # In a sum over processes, not an average. Dividing by a power of two rounds nothing.
        weights = [(weight / self.rank.world_size, count) for weight, count in weights]
        super().gradients(update, step, weights, at)

    @contextmanager
    def _micro_batch(self, update: TaskUpdate, is_last: bool, size: int) -> Iterator[None]:
        """Compute a micro-batch within this context; after this process' last one, set the gradients of the step."""
        with buffers_unchanged(self.task, self.changing):
            self.draw(self._step, update.name, next(self._numbers))
            yield
            after = [buffer.clone() for buffer in self.shared_buffers()]
        gradients, share = [parameter.grad for parameter in update.trained], size / self._samples
        used = torch.tensor([float(gradient is not None) for gradient in gradients])
        leaf = [used.to(self.rank.device, non_blocking=True)]
        for parameter, gradient in zip(update.trained, gradients, strict=True):
            leaf.append(_nothing(parameter) if gradient is None else gradient)
            parameter.grad = None
        for new, old in zip(after, self.shared_buffers(), strict=True):
            leaf.append((new - old) * share)
        add_leaf(self._branches, leaf if size else [_nothing(term) for term in leaf])
        if is_last:
            for _ in self._numbers:  # an epoch's last step
                add_leaf(self._branches, [_nothing(term) for term in leaf])
            self._finish(update)

    def _finish(self, update: TaskUpdate) -> None:
        """Set gradients and buffers to the results of all micro-batches of all processes."""
        [(_, sums)] = self._branches
        sum_branches(sums, self.rank, self.bucket_mb)
        used, end = sums[0].tolist(), 1 + len(update.trained)
        for parameter, gradient, count in zip(update.trained, sums[1:end], used, strict=True):
            parameter.grad = gradient if count else None
        for buffer, change in zip(self.shared_buffers(), sums[end:], strict=True):
            # A norm counts its batches as an integer: one per step.
            buffer.add_(change if buffer.is_floating_point() else change.round().to(buffer.dtype))
        self.draw(self._step, update.name, -1)  # for the optimizer and `after_step`

    def draw(self, step: int, update: str, number: int) -> None:
        """Seed all random generators of this process for a micro-batch, numbered over all processes."""
        set_seed(mix(self.config.dist.random_seed, _DRAWS, step, crc32(update.encode()), number))

    def shared_buffers(self) -> list[Tensor]:
        """Return the buffers in `changing` (not copies)."""
        return [getattr(module, name).detach() for module, name in self.changing.values()]


def _nothing(like: Tensor) -> Tensor:
    """Return the additive identity: -0.0, since adding 0.0 would change -0.0."""
    return torch.full_like(like, -0.0)
