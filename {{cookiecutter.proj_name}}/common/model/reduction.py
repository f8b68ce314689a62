"""A step with the same bits on any number of processes (`dist.reduction: fixed`); see docs/reduction.md.

A step's micro-batches are the same samples on any number of processes. Each is computed by itself: with its own random
draws, from the buffers as they were before the step. What comes of it is added along a fixed tree.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.data.keyed import seed_all
from common.data.plan import GlobalBatch
from common.distributed import DistConfig, Rank, buffer_kinds, share_buffers
from common.distributed.buffers import buffers_unchanged, named_buffers
from common.distributed.seed import mix, random_state_unchanged
from common.distributed.tree import TreeSum, leaves_here, sum_of_branches
from common.model.config import PrepareConfig

_DRAWS = 3  # distinguishes the keys of micro-batches from those of data
_TRIAL = -1  # the step that the draws of a trial are for


class Update(Protocol):
    """The part of a `TaskUpdate` that is used here."""

    name: str
    trained: list[nn.Parameter]


class RunSettings(Protocol):
    """The sections of the config that are used here."""

    dist: DistConfig
    prepare: PrepareConfig


class FixedReduction:
    """Computes the micro-batches of a step independently of each other, and sums their gradients along a fixed tree.

    Running statistics of norms change by the mean of their changes by each micro-batch, weighted by samples, and
    buffers declared as `sum` by their sum. No other buffer may change in a training step.

    Args:
        leaves: micro-batches of a step, over all processes.

    Raises:
        UserError: the run cannot have the same bits on any number of processes.
    """

    def __init__(self, task: nn.Module, leaves: int, config: RunSettings, seed: int, rank: Rank) -> None:
        self.task, self.rank, self._seed, self._bucket_mb = task, rank, seed, config.dist.bucket_mb
        self._here = leaves_here(leaves, rank)
        self._tree = TreeSum(leaves // (leaves & -leaves))
        if rank.device.type != "cpu" and config.dist.deterministic != "strict":
            raise UserError(
                "dist.reduction fixed: on a GPU it needs --dist.deterministic strict, with which PyTorch names an "
                "operator whose bits differ from one time to the next"
            )
        if config.prepare.compile.enabled:
            raise UserError(
                "dist.reduction fixed: prepare.compile must be off: the compiler's code depends on which shapes a "
                "process has seen, and not every process sees an epoch's last, smaller micro-batch"
            )
        kinds = buffer_kinds(task)
        if other := next((f"{name} as {kind}" for name, kind in kinds.items() if kind != "sum"), ""):
            raise UserError(
                f"dist.reduction fixed: buffer_kinds declares {other}: on one process, each micro-batch would see what "
                "the one before it has left there. Only sum has the same meaning on any number of processes"
            )
        # Weighted by samples: norms; added up: sums.
        self._kinds = {
            name: "mean" if isinstance(module, _NormBase) else kinds[name]
            for name, module, _, _ in named_buffers(task)
            if isinstance(module, _NormBase) or name in kinds
        }
        self._step = self._number = self._samples = 0
        self._before: list[Tensor] = []
        share_buffers(task, rank)
        if not rank.is_single_process:
            weights = [parameter.detach() for parameter in task.parameters()]
            dist._broadcast_coalesced(dist.group.WORLD, weights, 25 << 20, 0)  # type: ignore[attr-defined, arg-type]

    def begin(self, batch: GlobalBatch) -> None:
        """Begin a step. What the task draws outside of micro-batches is the same on every process."""
        self._step, self._samples = batch.after.step, batch.samples
        self._draw("", 0)

    @contextmanager
    def part(self, update: Update, is_last: bool, size: int) -> Iterator[None]:
        """Compute a micro-batch of `size` samples within this context; after the last one, set the gradients of all.

        Samples borrowed by a process that has none (`size` 0) add nothing.
        """
        if self._number == 0:
            self._before = [buffer.detach().clone() for buffer in self._buffers()]
        self._restore_buffers()
        self._draw(update.name, self.rank.rank * self._here + self._number)
        yield
        terms = [parameter.grad for parameter in update.trained] + self._changes(size)
        for parameter in update.trained:
            parameter.grad = None
        self._tree.add(terms if size else [None] * len(terms))
        self._number += 1
        if not is_last:
            return
        for _ in range(self._number, self._here):  # an epoch's last step
            self._tree.add([None] * len(terms))
        like = [*update.trained, *(torch.empty_like(each) for each in self._changes(1))]
        total = sum_of_branches(self._tree.result(), like, self.rank, self._bucket_mb)
        for parameter, gradient in zip(update.trained, total, strict=False):
            parameter.grad = gradient
        self._restore_buffers(total[len(update.trained) :])
        self._number = 0
        self._draw(update.name, -1)  # for the optimizer and `after_step`

    def try_twice(self, update: Update, loss: Callable[[], Tensor]) -> None:
        """Compute a micro-batch twice, with the same draws; weights, buffers and random streams stay as they are.

        Raises:
            UserError: bits differ, with the first module; a buffer changes that is not declared; a sparse gradient.
        """
        names = {parameter: name for name, parameter in self.task.named_parameters()}
        self.task.train()
        with random_state_unchanged(self.rank.device), buffers_unchanged(self.task):
            step, self._step, self._before = self._step, _TRIAL, [buffer.detach().clone() for buffer in self._buffers()]

            def gradients() -> dict[str, str]:
                self.task.zero_grad()
                self._restore_buffers()
                self._draw(update.name, 0)
                loss().backward()
                found = {names[each]: each.grad for each in update.trained if each.grad is not None}
                if sparse := next((name for name, gradient in found.items() if gradient.is_sparse), ""):
                    raise UserError(f"dist.reduction fixed: {sparse} has a sparse gradient; make it a dense one")
                return {name: _digest(gradient) for name, gradient in found.items()}

            first = gradients()  # also of what a module only computes once
            others = {name: _digest(each) for name, _, _, each in named_buffers(self.task) if name not in self._kinds}
            second = gradients()
            for name, _, _, buffer in named_buffers(self.task):
                if name not in self._kinds and _digest(buffer) != others.get(name):
                    raise UserError(
                        f"dist.reduction fixed: a batch changes the buffer {name}, and what comes of it would depend "
                        "on the number of processes. If changes add up, declare it as sum in buffer_kinds, see "
                        "docs/task.md; if not, change it in Task.after_step"
                    )
            if differing := [name for name in first if first[name] != second[name]]:
                where = self._first_module(gradients) or f"the gradient of {differing[-1]}"
                raise UserError(
                    f"dist.reduction fixed: the same micro-batch computed twice gives different bits, first in {where}. "
                    "Replace the operation by a deterministic one; --dist.deterministic strict may name it"
                )
        self._step = step
        self.task.zero_grad()

    def _first_module(self, compute: Callable[[], Any]) -> str:
        """Return the first module, in order of execution, whose output differs between two runs of `compute`."""
        runs: list[list[tuple[str, str]]] = []
        hooks = [
            module.register_forward_hook(lambda _, inputs, output, name=name: runs[-1].append((name, _digest(output))))
            for name, module in self.task.named_modules()
            if name
        ]
        for _ in range(2):
            runs.append([])
            compute()
        for hook in hooks:
            hook.remove()
        pairs = zip(*runs, strict=False)
        return next((f"the module {name}" for (name, one), (_, other) in pairs if one != other), "")

    def _draw(self, update: str, number: int) -> None:
        """Seed all random streams of this process for a micro-batch, numbered over all processes."""
        seed_all(seed := mix(self._seed, _DRAWS, self._step, crc32(update.encode()), number))
        if self.rank.device.type != "cpu":
            torch.get_device_module(self.rank.device).manual_seed(seed)

    def _buffers(self) -> list[Tensor]:
        return [buffer for name, _, _, buffer in named_buffers(self.task) if name in self._kinds]

    def _changes(self, size: int) -> list[Tensor]:
        """What a micro-batch of `size` samples adds to the changes of the buffers."""
        share = size / max(self._samples, 1)
        changes = [now.detach() - before for now, before in zip(self._buffers(), self._before, strict=True)]
        return [
            each * share if kind == "mean" else each for each, kind in zip(changes, self._kinds.values(), strict=True)
        ]

    @torch.no_grad()
    def _restore_buffers(self, changes: Any = ()) -> None:
        """Set the buffers to what they were before the step, plus `changes`."""
        for number, (buffer, before) in enumerate(zip(self._buffers(), self._before, strict=True)):
            change = changes[number] if changes else None
            if change is None:
                buffer.copy_(before)
            else:  # a norm counts its batches in whole numbers
                buffer.copy_(before + (change if before.is_floating_point() else change.round().to(before.dtype)))


def _digest(value: Any) -> str:
    """Return a checksum of all bits of a value's tensors."""
    found = hashlib.blake2b(digest_size=16)
    map_tensors(value, lambda each: found.update(each.detach().cpu().reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()
