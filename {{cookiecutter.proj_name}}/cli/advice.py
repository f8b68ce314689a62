"""Advice on mistakes in models, data sets, losses and metrics: what the batch held, and the likely cause."""

import inspect
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from common.base.errors import UserError
from common.base.text import label
from common.data.loader import EvaluationLoader
from common.failure.program import TrainingError
from common.failure.report import HINT
from common.step import OptimizerStep
from common.task import Task
from cli.advice_texts import ADVICE, BROADCAST, MACHINE, UNEQUAL, WITHOUT_TASK

PROJECT = f"{Path(__file__).resolve().parents[1]}/"


@contextmanager
def explain_errors() -> Iterator[None]:
    """Add to an error raised in the block what the batch held, and advice; or raise a clear `TrainingError` instead."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", BROADCAST)
            yield
    except UserError:
        raise
    except Exception as error:
        if explanation := _explain(error):
            raise explanation from error
        raise


def _explain(error: Exception) -> TrainingError | None:
    """An error to raise instead, if the cause is known; otherwise adds notes to `error`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    notes = getattr(error, "__notes__", [])
    for explain in (_forked_with_cuda, _pairs, _unequal_samples, _bad_label, _no_gradient, _changed_in_place):
        with suppress(Exception):  # the error matters more than one in explaining it
            if text := explain(error, frames):
                explanation: Any = TrainingError(text)
                explanation.__notes__ = notes
                return explanation
    noted: Any = error
    with suppress(Exception):
        noted.__notes__ = [*notes, *_notes(error, frames)]
    return None


def _notes(error: Exception, frames: Sequence[FrameType]) -> Iterator[str]:
    """What the batch and the output held where the error was raised, and the advice."""
    if (task := _task(frames)) is not None:
        for name in ("batch", "output"):
            if (value := _local(frames, name)) is not None:
                yield f"with the {name}: {described(value)}"
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    text = f"{_text(error)} at {line}"
    for pattern, advice in ADVICE.items():
        if re.search(pattern, text) and (task or pattern in WITHOUT_TASK):
            model = None if task is None else task.model
            advice = _channels(text, _local(frames, "batch"), model) or advice
            yield HINT + advice.format(forward=_place(model, "forward"), output=_place(task, "output"))
            return
    text = _text(error)
    yield from [HINT + advice for pattern, advice in MACHINE.items() if re.search(pattern, text, re.IGNORECASE)][:1]


def _channels(text: str, batch: Any, model: nn.Module | None) -> str:
    """For images of another number of channels than `model.in_channels`: the right setting; otherwise ""."""
    found = re.search(r"to have (\d+) channels, but got (\d+) channels", text)
    if not found or "in_channels" not in inspect.signature(type(model)).parameters:
        return ""
    if not any(each.ndim == 4 and each.shape[1] == int(found[2]) for each in _tensors(batch)):
        return ""
    return (
        f"the model does not fit the batch above: it takes images of {found[1]} channel(s), and these have {found[2]}; "
        f"use --model.in_channels {found[2]}"
    )


def _text(error: Exception) -> str:
    """Type and message; of an error in a worker, whose message is a traceback, only its last line."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {error}"


def described(value: Any) -> str:
    """Types and shapes: `image float32 (64, 1, 8, 8), label int64 (64,)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {described(each)}" for key, each in value.items()) or "an empty dict"
    if isinstance(value, (list, tuple)):
        more = ", ..." if len(value) > 4 else ""
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(described, value[:4]))}{more})"
    return "None" if value is None else "text" if isinstance(value, str) else f"a {type(value).__name__}"


def _is_own(path: str) -> bool:
    """Whether a file is the project's own, not one of a library."""
    return path.startswith(PROJECT) and "site-packages" not in path


def _local(frames: Sequence[FrameType], name: str) -> Any:
    """The value of a local variable in the innermost frame of the project that has it; None if none has."""
    own = (frame.f_locals for frame in reversed(frames) if _is_own(frame.f_code.co_filename))
    return next((each[name] for each in own if each.get(name) is not None), None)


def _objects(frames: Sequence[FrameType]) -> list[Any]:
    """The objects whose methods were running, the innermost first."""
    return [frame.f_locals["self"] for frame in reversed(frames) if "self" in frame.f_locals]


def _task(frames: Sequence[FrameType]) -> Task | None:
    """The task that was running or evaluated, or whose gradient was computed."""
    found = (each for one in _objects(frames) for each in (one, getattr(one, "task", None)))
    return next((each for each in found if isinstance(each, Task)), None)


def _loader(frames: Sequence[FrameType]) -> EvaluationLoader | None:
    """The loader of the evaluation that was running; None in training."""
    found = (value for frame in frames for value in frame.f_locals.values())
    return next((each for each in found if isinstance(each, EvaluationLoader)), None)


def _optimizer_step(frames: Sequence[FrameType]) -> OptimizerStep | None:
    """What takes the step; None in an evaluation."""
    return next((each for each in _objects(frames) if isinstance(each, OptimizerStep)), None)


def _batch(optimizer_step: OptimizerStep, frames: Sequence[FrameType]) -> Any:
    """The batch of the step, on the device; a sample batch if the error was raised in preparing the step."""
    batch = _local(frames, "batch")
    if batch is None:
        batch = optimizer_step.sample() if optimizer_step.sample is not None else _local(frames, "step").batches[0]
    return optimizer_step.task.prepare_batch(optimizer_step.precision.cast_batch(batch), optimizer_step.rank.device)


def _place(owner: Any, method: str) -> str:
    """`Class.method (file:line)`, or `function (file:line)`, with the file relative to the project."""
    if inspect.isfunction(owner):
        name, function = owner.__name__, inspect.unwrap(owner)
    else:
        name, function = f"{type(owner).__name__}.{method}", inspect.unwrap(getattr(type(owner), method, type(owner)))
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename.removeprefix(PROJECT)}:{code.co_firstlineno})" if code else name


def _forked_with_cuda(error: Exception, _: Sequence[FrameType]) -> str:
    """For CUDA's errors in a process forked from one that uses a GPU, on new and existing tensors; otherwise ""."""
    pattern = ".*(Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error).*"
    if not (found := re.search(pattern, str(error))):  # a worker's error has more lines
        return ""
    return (
        f"{found[0]}\n  A worker process that was forked cannot use the GPU. Keep the data set on the CPU, or "
        "start workers with --loader.start_method forkserver, or use none (--worker 0)"
    )


def _pairs(error: Exception, _: Sequence[FrameType]) -> str:
    """For a loss of predictions (B, 1) and targets (B,), of which torch makes all (B, B) pairs; otherwise ""."""
    if not (found := re.match(BROADCAST, str(error))):
        return ""
    target, given = found[1], found[3]
    return (
        f"the target has the shape {target}, but the prediction {given}: the loss would compare each prediction with "
        "each target. Give both the same shape: target[:, None] in the data set, or output.squeeze(1) in the task"
    )


def _unequal_samples(error: Exception, frames: Sequence[FrameType]) -> str:
    """For samples that cannot be joined to a batch: two that differ, found by reading them again; otherwise ""."""
    trace = f"{error} {frames[-1].f_code.co_filename}"  # a worker's error holds its traceback as text
    if not re.search(UNEQUAL, _text(error)) and not (isinstance(error, KeyError) and "_utils/collate.py" in trace):
        return ""
    dataset, numbers, of = _samples(frames)
    first: dict[Any, str] = {}
    for number in numbers:
        sample = dataset[number]
        parts = sample if isinstance(sample, Mapping) else dict(enumerate(sample))
        parts = {key: described(each) for key, each in parts.items()}
        first = first or parts
        for key in {**first, **parts}:
            one, two = first.get(key, "missing"), parts.get(key, "missing")
            if one != two:
                return (
                    f"samples of {of} cannot be joined to a batch: {key} is {one} in sample {numbers[0]}, but {two} in "
                    f"sample {number}; give all the same (dataset.*.transforms can resize), or write a loader.collate"
                )
    return ""


def _bad_label(error: Exception, frames: Sequence[FrameType]) -> str:
    """For a label that is not one of the classes: the samples that have it; otherwise "". Also after a CUDA assert."""
    if not re.search("out of bounds|device-side assert", str(error)):
        return ""
    # Read again, since the batch may be on a device, which is unusable after an assert.
    (dataset, numbers, of), classes = _samples(frames), _local(frames, "output")["logits"].shape[1]
    labels = [int(dataset[number]["label"]) for number in numbers]
    wrong = [at for at, each in enumerate(labels) if not 0 <= each < classes and each != -100]
    shown = ", ".join(f"{labels[at]} in sample {numbers[at]}" for at in wrong[:5])
    more = f" and {len(wrong) - 5} more of this batch" if len(wrong) > 5 else ""
    if not wrong:
        return ""
    return (
        f"label {shown}{more} of {of}: the model gives {classes} classes, so labels must be 0 to {classes - 1}; "
        "correct the labels, or give the model more classes (model.classes or num_classes)"
    )


def _samples(frames: Sequence[FrameType]) -> tuple[Any, list[int], str]:
    """The data set that was read, the numbers of the samples in the batch or step, and the name of the split."""
    if (loader := _loader(frames)) is not None:
        numbers = loader.keys[_local(frames, "seen").batches][1]
        return loader.dataset, numbers, f"dataset.{label(loader.split, loader.name)}"
    trainer = next(each for each in _objects(frames) if hasattr(each, "stream"))
    return trainer.stream.dataset, list(chain(*trainer.stream.samples(trainer.at))), "dataset.train"


def _no_gradient(error: Exception, frames: Sequence[FrameType]) -> str:
    """For a loss without a gradient: the forward that cuts it off, found by running the model again; otherwise ""."""
    optimizer_step = _optimizer_step(frames)
    if "does not require grad" not in str(error) or optimizer_step is None or optimizer_step.strategy.lockstep_forward:
        return ""
    task = optimizer_step.task
    found: list[nn.Module] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        is_own = _is_own(inspect.unwrap(type(module).forward).__code__.co_filename)
        has_weights = any(each.requires_grad for each in module.parameters())
        if is_own and has_weights and not any(each.requires_grad for each in _tensors(output)):
            found.append(module)

    handles = [module.register_forward_hook(note) for module in task.model.modules()]
    try:
        output = task.output(_batch(optimizer_step, frames))
    finally:
        for handle in handles:
            handle.remove()
    if found:
        where = _place(found[0], "forward")
    elif not any(each.requires_grad for each in _tensors(output)):
        where = _place(task, "output")
    elif type(task).losses is not Task.losses:
        where = _place(task, "losses")
    else:
        where = " or ".join(_place(term.function, "__call__") for term in task.loss.terms)
    return (
        f"the loss has no gradient: the result of {where} is cut off from the weights. These cut it off: .detach(), "
        ".item(), .data, .numpy(), torch.no_grad(), argmax, rounding, torch.tensor(...) of a tensor"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from _tensors(each)


def _changed_in_place(error: Exception, frames: Sequence[FrameType]) -> str:
    """For a value changed in place: the line that computed it, found by running the step again; otherwise ""."""
    optimizer_step, update = _optimizer_step(frames), _local(frames, "update")
    if "inplace operation" not in str(error) or optimizer_step is None or optimizer_step.strategy.lockstep_forward:
        return ""
    batch = _batch(optimizer_step, frames)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with suppress(RuntimeError):
            optimizer_step.task.update(update.name, batch)["loss"].backward()
    text = "\n".join(str(each.message) for each in found)
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n +(.+)', text)
    own = [line for line in lines if _is_own(line[0]) and not line[0].startswith(f"{PROJECT}common/")]
    if not own:
        return ""
    path, number, function, code = own[-1]
    return (
        "the gradient cannot be computed: a value that it needs was changed in place (x += y, x[i] = y, relu_), after "
        f"this line used or made it: {path.removeprefix(PROJECT)}:{number}, in {function}: {code}\n"
        "  Make a new value instead, as in x = x + y"
    )
