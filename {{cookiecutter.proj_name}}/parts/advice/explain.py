"""Advice on mistakes in models, datasets, losses and metrics: the contents of the batch, and the likely cause."""

import inspect
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
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
        notes = getattr(error, "__notes__", [])
        wrong_labels = ""
        with suppress(Exception):  # the error matters more than one in explaining it
            wrong_labels = _wrong_labels(error, frames)
        if wrong_labels:
            explanation = TrainingError(wrong_labels)
            vars(explanation)["__notes__"] = notes
            raise explanation from error
        with suppress(Exception):
            vars(error)["__notes__"] = [*notes, *_notes(error, frames)]
        raise


def _notes(error: Exception, frames: Sequence[FrameType]) -> Iterator[str]:
    """Describe the batch and the output where the error was raised, and give the advice."""
    task = _task(frames)
    if task is None:
        return
    for name in ("batch", "output"):
        if (value := _local(frames, name)) is not None:
            yield f"with the {name}: {describe(value)}"
    lines = str(error).strip().splitlines() or [""]
    # The message of a worker's error is a traceback, whose last line has type and message.
    text = lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {error}"
    at = f"{text} at {traceback.extract_tb(error.__traceback__)[-1].line}"
    for pattern, advice in ADVICE.items():
        if re.search(pattern, at):
            yield HINT + advice.format(forward=_where(task.model, "forward"), output=_where(task, "output"))
            return


def describe(value: Any) -> str:
    """Describe types and shapes: `image float32 (64, 1, 8, 8), label int64 (64,)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {describe(item)}" for key, item in value.items()) or "an empty dict"
    if isinstance(value, (list, tuple)):
        more = ", ..." if len(value) > 4 else ""
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(describe, value[:4]))}{more})"
    return "None" if value is None else "text" if isinstance(value, str) else f"a {type(value).__name__}"


def _local(frames: Sequence[FrameType], name: str) -> Any:
    """Return a local variable of the innermost frame of the project that has it; None if no frame has."""
    variables = (frame.f_locals for frame in reversed(frames) if frame.f_code.co_filename.startswith(f"{PROJECT}/"))
    return next((names[name] for names in variables if names.get(name) is not None), None)


def _owners(frames: Sequence[FrameType]) -> list[Any]:
    """Return the objects whose methods ran, innermost first."""
    return [frame.f_locals.get("self") for frame in reversed(frames)]


def _task(frames: Sequence[FrameType]) -> Any:
    """Return the task of the innermost object that is or has one; None if no object does."""
    tasks = (item for value in _owners(frames) for item in (value, getattr(value, "task", None)))
    return next((task for task in tasks if isinstance(task, Task)), None)


def _where(owner: Any, method: str) -> str:
    """`Class.method (file:line)`, with the file relative to the project."""
    name, function = f"{type(owner).__name__}.{method}", getattr(type(owner), method, None)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return f"{name} ({code.co_filename.removeprefix(f'{PROJECT}/')}:{code.co_firstlineno})" if code else name


def _wrong_labels(error: Exception, frames: Sequence[FrameType]) -> str:
    """Name the samples whose label is no class, for the errors that torch and CUDA raise then; otherwise ""."""
    if not re.search("out of bounds|device-side assert", str(error)):
        return ""
    task, output, loader = _task(frames), _local(frames, "output"), _local(frames, "loader")
    trainer: Any = next((value for value in _owners(frames) if hasattr(value, "evaluator")), None)
    # The labels are read again, also those before: a GPU reports an assert later, and then none of its tensors can be.
    if loader is not None:
        done = _local(frames, "seen").batches
        numbers = list(chain(*(indices for _, indices in loader.keys[max(done - 1, 0) : done + 1])))
        dataset, name = loader.dataset, label(loader.split, loader.name)
    else:
        at, stream = trainer.at, trainer.stream
        before = min(at.sample // stream.samples_per_step, _BEFORE)
        at = at._replace(step=at.step - before, sample=at.sample - before * stream.samples_per_step)
        numbers = list(chain(*stream.samples(at, before + 1)))
        dataset, name = stream.dataset, "train"
    # By then, the output of that step may be gone.
    classes = trainer.classes if output is None else output["logits"].shape[1]
    if classes is None:
        return ""
    parts = [*task.modules(), *chain(*(vars(term.function).values() for term in task.loss.terms))]
    known = {-100, *range(classes), *(getattr(part, "ignore_index", -100) for part in parts)}
    labels = {number: torch.as_tensor(dataset[number]["label"]).unique().tolist() for number in numbers}
    pairs = [(number, label) for number, inside in labels.items() for label in inside]
    wrong = [f"{label} in sample {number}" for number, label in pairs if label not in known]
    if not wrong:
        return ""
    return (
        f"label {join_names(wrong, 5)} of dataset.{name}: the model gives {classes} classes, so labels must be 0 "
        f"to {classes - 1}, or -100, which is ignored; correct the labels, or give the model more classes "
        "(model.classes or num_classes)"
    )
