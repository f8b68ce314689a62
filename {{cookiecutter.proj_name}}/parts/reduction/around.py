"""With `dist.reduction: fixed`: refuse, before training, what has no fixed bits on one process alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from common.base.errors import UserError
from common.checkpoint.checksum import checksum
from common.distributed.buffers import buffers_unchanged, named_buffers
from common.distributed.seed import random_state_unchanged
from common.run_context import RunContext
from common.step import TaskUpdate
from common.trainer import Trainer
from parts.reduction.step import FixedStep

_TRIAL = -1  # the step that the random draws of the trial are for


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Before training, refuse what has no fixed bits."""
    refuse_varying_bits(trainer)
    yield


def refuse_varying_bits(trainer: Trainer) -> None:
    """Compute a micro-batch of each update twice, with the same draws; nothing of it stays.

    Raises:
        UserError: data or results differ, a batch changes a buffer, or a gradient is sparse.
    """
    step, stream = trainer.optimizer_step, trainer.stream
    if not isinstance(step, FixedStep) or not stream.is_indexed:
        return
    for name, reading in trainer.state.fingerprint["data"].items():  # none without parts/data_check
        if reading["varies"]:
            raise UserError(
                "dist.reduction fixed needs data that are the same whenever they are read; "
                f"dataset.{name}: {reading['varies']}"
            )
    trainer.task.train()
    before = deepcopy(stream.state_dict())
    batch = stream.sample_batch(full=True)
    stream.load_state_dict(before)  # reading changes a dataset that counts
    stream.batches.epoch = None
    for update in step.updates.values():
        with random_state_unchanged(step.rank.device), buffers_unchanged(trainer.task):
            # In the first, there is also what a module computes only once.
            first, second = (compute(step, update, deepcopy(batch)) for _ in range(2))
        trainer.task.zero_grad()
        differing = [name for name, bits in second.items() if bits != first.get(name)]
        if differing:
            raise UserError(
                "dist.reduction fixed needs deterministic operations; --dist.deterministic strict may name others. A "
                f"micro-batch that was computed twice, with the same random numbers, differs in the {differing[0]}"
            )


def compute(step: FixedStep, update: TaskUpdate, batch: Any) -> dict[str, int]:
    """Compute a micro-batch. Returns checksums of all that must not vary, by what it is."""
    step.draw(_TRIAL, update.name, 0)
    step.task.zero_grad()
    batch = step.task.prepare_batch(step.precision.cast_batch(batch), step.rank.device)
    with buffers_unchanged(step.task, step.changing):
        with step.precision.autocast():
            loss = update.forward(update.name, batch)["loss"]
        loss.backward()
    found = {}
    for name, _, _, buffer in named_buffers(step.task):
        if buffer is not None and name not in step.changing:
            found[f"buffer {name}, which a batch changes: change it in Task.after_step"] = checksum(buffer)
    for name, parameter in step.task.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise UserError(f"dist.reduction fixed does not work with the sparse gradient of {name}; make it dense")
        found[f"gradient of {name}"] = checksum(parameter.grad)
    return found
