"""Advice on mistakes in models, datasets, losses and metrics: the contents of the batch, and the likely cause."""

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.base.files import PROJECT
from common.base.text import label
from common.config.problem import join_names
from common.failure.program import TrainingError
from common.failure.report import HINT
from common.task import Task
from parts.advice.texts import ADVICE, BROADCAST

_BEFORE = 20  # steps that a GPU may be behind when it reports an error


@contextmanager
def explain() -> Iterator[None]:
    """Add the contents of the batch, and advice, to errors raised in the block. A wrong label is a `TrainingError`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", BROADCAST)
            yield
    except UserError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        frames.reverse()
        notes = getattr(error, "__notes__", [])
        wrong_labels = ""
        with suppress(Exception):  # the error matters more than one in explaining it
            if re.search("out of bounds|device-side assert|CUBLAS_STATUS", str(error)):
                wrong_labels = _wrong_labels(frames)
        if wrong_labels:
            explanation = TrainingError(wrong_labels)
            vars(explanation)["__notes__"] = notes
            raise explanation from error
        with suppress(Exception):
            vars(error)["__notes__"] = [*notes, *_notes(error, frames)]
        raise


def _notes(error: Exception, frames: Sequence[FrameType]) -> Iterator[str]:
    """Describe the batch and the output where the error was raised, and give the advice."""
    for name in ("batch", "output"):
        value = _local(frames, name)
        if value is not None:
            yield f"with the {name}: {describe(value)}"
    text = f"{type(error).__name__}: {error}"
    if str(error).startswith("Caught "):  # by a worker: a traceback, indented but for type and message
        lines = str(error).splitlines()[2:]
        text = "\n".join(line for line in lines if not line.startswith(" "))
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    at = f"{text} at {line.partition('#')[0]}"
    for pattern, advice in ADVICE.items():
        if re.search(pattern, at):
            task = _task(frames)
            forward = output = "the task"
            if task is not None:
                forward = f"{type(task.model).__name__}.forward"
                output = f"{type(task).__name__}.output"
            yield HINT + advice.format(forward=forward, output=output)
            return


def describe(value: Any) -> str:
    """Describe types and shapes: `image float32 (64, 1, 8, 8), label int64 (64,)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {describe(item)}" for key, item in value.items()) or "an empty dict"
    if isinstance(value, (list, tuple)):
        items = [describe(item) for item in value[:4]]
        if len(value) > 4:
            items.append("...")
        return f"a {type(value).__name__} of {len(value)} ({', '.join(items)})"
    if value is None:
        return "None"
    return f"a {type(value).__name__}"


def _local(frames: Sequence[FrameType], name: str) -> Any:
    """Return a local variable of the innermost frame of the project that has it; None if no frame has."""
    for frame in frames:
        value = frame.f_locals.get(name)
        if value is not None and frame.f_code.co_filename.startswith(f"{PROJECT}/"):
            return value
    return None


def _task(frames: Sequence[FrameType]) -> Task | None:
    """Return the task of the innermost object that is or has one; None if no object does."""
    for frame in frames:
        owner = frame.f_locals.get("self")
        for value in (owner, getattr(owner, "task", None)):
            if isinstance(value, Task):
                return value
    return None


def _wrong_labels(frames: Sequence[FrameType]) -> str:
    """Name the samples whose label is no class; "" if there is none, or nothing is known of them.

    The labels are read again, also those before: a GPU reports an assert later, and then none of its tensors can be.
    """
    task = _task(frames)
    output = _local(frames, "output")
    loader = _local(frames, "loader")
    owners = [frame.f_locals.get("self") for frame in frames]
    trainer: Any = next((owner for owner in owners if hasattr(owner, "evaluator")), None)
    classes: int | None = None
    if output is not None:
        classes = output["logits"].shape[1]
    elif trainer is not None:  # by then, the output of that step may be gone
        classes = trainer.classes
    if task is None or classes is None:
        return ""
    if loader is not None:
        done = _local(frames, "seen").batches
        numbers = []
        for _, indices in loader.keys[max(done - 1, 0) : done + 1]:
            numbers += indices
        dataset = loader.dataset
        name = label(loader.split, loader.name)
    else:
        stream = trainer.stream
        before = min(trainer.at.sample // stream.samples_per_step, _BEFORE)
        sample = trainer.at.sample - before * stream.samples_per_step
        at = trainer.at._replace(step=trainer.at.step - before, sample=sample)
        numbers = stream.samples(at, before + 1)
        dataset = stream.dataset
        name = "train"
    known = {-100, *range(classes)}
    for part in task.modules():
        known.add(getattr(part, "ignore_index", -100))
    for term in task.loss.terms:
        for value in vars(term.function).values():
            known.add(getattr(value, "ignore_index", -100))
    wrong = []
    for number in numbers:
        for value in torch.as_tensor(dataset[number]["label"]).unique().tolist():
            if value not in known:
                wrong.append(f"{value} in sample {number}")
    if not wrong:
        return ""
    return (
        f"label {join_names(wrong, 5)} of dataset.{name}: the model gives {classes} classes, so labels must be 0 "
        f"to {classes - 1}, or -100, which is ignored; correct the labels, or give the model more classes "
        "(model.classes or num_classes)"
    )
