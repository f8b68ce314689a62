"""With `dist.reduction: fixed`: refuse, before training, what has no fixed bits on one process alone."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.data.loader import TrainStream
from common.distributed.buffers import buffers_unchanged, named_buffers
from common.distributed.seed import random_state_unchanged
from common.fixed_step import FixedStep
from common.step import TaskUpdate
from common.trainer import Trainer

_TRIAL = -1  # the step that the random draws of the trial are for
Bits = dict[str, str]
"""A checksum of each tensor, by its name."""


def refuse_varying_bits(trainer: Trainer) -> None:
    """Compute a micro-batch of each update twice, with the same draws; nothing of it stays.

    Raises:
        UserError: bits of a module differ, a batch changes a buffer that is not declared, or a gradient is sparse.
    """
    step, stream = trainer.optimizer_step, trainer.stream
    if not isinstance(step, FixedStep) or not isinstance(stream, TrainStream):
        return
    trainer.task.train()
    batch = stream.sample_batch(full=True)
    for update in step.updates.values():
        with random_state_unchanged(step.rank.device), buffers_unchanged(trainer.task):
            before = [buffer.clone() for buffer in step.buffers_now()]

            def gradients(update: TaskUpdate = update, before: list[Tensor] = before) -> Bits:
                step.set_buffers(before)
                step.draw(_TRIAL, update.name, 0)
                return _gradients(step, update, deepcopy(batch))

            _compare(step, gradients)
        trainer.task.zero_grad()


def _gradients(step: FixedStep, update: TaskUpdate, batch: Any) -> Bits:
    step.task.zero_grad()
    batch = step.task.prepare_batch(step.precision.cast_batch(batch), step.rank.device)
    with step.precision.autocast():
        loss = update.forward(update.name, batch)["loss"]
    loss.backward()
    found = {}
    for name, parameter in step.task.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(f"dist.reduction fixed does not go with the sparse gradient of {name}; make it dense")
        if parameter.grad is not None:
            found[name] = _checksum(parameter.grad)
    return found


def _compare(step: FixedStep, gradients: Callable[[], Bits]) -> None:
    """Raise `UserError` if two calls differ."""
    first = gradients()  # after it, there is also what a module computes only once
    before = {name: _checksum(buffer) for name, _, _, buffer in named_buffers(step.task)}
    second = gradients()
    for name, _, _, buffer in named_buffers(step.task):
        if name not in step.changing and _checksum(buffer) != before.get(name):
            raise UserError(
                f"dist.reduction fixed: a batch changes the buffer {name}, so what it holds would depend on the number "
                "of processes. If the changes of batches add up, declare it as sum in buffer_kinds, see docs/task.md; "
                "if not, change it in Task.after_step"
            )
    if differing := [name for name in second if first.get(name) != second[name]]:
        with _outputs(step) as outputs:
            gradients()
            count = len(outputs)
            gradients()
        pairs = zip(outputs[:count], outputs[count:], strict=False)
        module = next((f"the output of {name}" for (name, one), (_, other) in pairs if one != other), "")
        raise UserError(
            "dist.reduction fixed: a micro-batch that was computed twice, with the same random numbers, has different "
            f"bits, first in {module or f'the gradient of {differing[-1]}'}. Use a deterministic operation there; "
            "--dist.deterministic strict may name the one that is not"
        )


@contextmanager
def _outputs(step: FixedStep) -> Iterator[list[tuple[str, str]]]:
    """Collect the name of each module that is called, and a checksum of its output, in the order in which they end."""
    found: list[tuple[str, str]] = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: found.append((name, _checksum(output))))
        for name, module in step.task.named_modules()
        if name
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _checksum(value: Any) -> str:
    """Return a checksum of all bits of the tensors in an output."""
    found = hashlib.blake2b(digest_size=16)

    def add(tensor: Tensor) -> Tensor:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    map_tensors(value, add)
    return found.hexdigest()
