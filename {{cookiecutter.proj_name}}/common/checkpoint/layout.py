"""The tensors of a task in a checkpoint: whether a task that is built anew could load them, and which are left out."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from common.base.errors import UserError
from common.base.nested import map_leaves
from common.checkpoint.checksum import checksum
from common.checkpoint.file import plain
from common.config.problem import join_names
from common.distributed import own_buffers
from common.distributed.collectives import whole

EXTRA = "_extra_state"  # how torch ends the names of what `get_extra_state` returns
_SHOWN = 5


class Layout:
    """Parameters and buffers of a task that was just built, as every checkpoint of it must have them.

    Args:
        task: before a checkpoint is loaded and before the first step.

    Attributes:
        empty: the names of its buffers that are None.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task
        self._entries = _entries(task)
        self._unsaved = _unsaved(task)
        self._warned = False
        self.empty = {name for name, buffer in _buffers(task) if buffer is None}

    def begin(self) -> None:
        """Note the buffers that no checkpoint holds, after a trial of the task and before the first step.

        Raises `UserError` as `check` does.
        """
        self.check()
        self._unsaved = _unsaved(self._task)

    def check(self) -> None:
        """Raise `UserError` if a task that is built anew could not load the state of this one.

        It can if a buffer began as None, or has another shape than then: see `fit_buffers`.
        """
        now = _entries(self._task)
        wrong = []
        for name in sorted(now.keys() | self._entries.keys()):
            old = self._entries.get(name, "absent")
            new = now.get(name, "absent")
            if old != new and name not in self.empty:
                wrong.append(f"  {name}: {old} when the task was built, {new} now")
        if wrong:
            more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            raise UserError(
                "a checkpoint of this run could not be loaded again, since a resume builds the task anew:\n"
                + "\n".join(wrong[:_SHOWN] + more)
                + "\n  Make modules, parameters and buffers in __init__, parameters in their final shape. The "
                "optimizer does not train any that are made later. A buffer may begin as None, and change its shape."
            )

    def lost_buffers(self) -> list[str]:
        """Return the names of buffers that training has changed and no checkpoint holds; warns of them once."""
        names = [name for name, number in _unsaved(self._task).items() if number != self._unsaved.get(name)]
        if names and not self._warned:
            self._warned = True
            logger.warning(
                "training has changed buffers that are not saved: {}. A resume begins with those of a model that was "
                "just built; unless they are computed anew from each batch, register them with persistent=True",
                join_names(names, _SHOWN),
            )
        return names


def _buffers(task: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the buffers that a checkpoint holds, also those that are None."""
    for above, module in task.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if leaf not in module._non_persistent_buffers_set:
                yield f"{above}.{leaf}".removeprefix("."), buffer


def _entries(task: nn.Module) -> dict[str, str]:
    """Return what a checkpoint holds, in words, by name."""
    entries = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        entries[name] = f"a parameter of shape {tuple(parameter.shape)}, {parameter.dtype}"
    for name, buffer in _buffers(task):
        if buffer is not None:
            entries[name] = f"a buffer, {buffer.dtype}"
    return entries


def _unsaved(task: nn.Module) -> dict[str, int]:
    """Return checksums of the buffers with `persistent=False`."""
    found = {}
    for above, module in task.named_modules():
        for leaf in sorted(module._non_persistent_buffers_set):
            name = f"{above}.{leaf}".removeprefix(".")
            buffer = getattr(module, leaf)
            if buffer is not None:
                found[name] = checksum(buffer)
    return found


def fit_buffers(task: nn.Module, saved: Mapping[str, Any], empty: Collection[str] = ()) -> None:
    """Give buffers the shapes of those in `saved`, to be loaded.

    `empty`: buffers that are None if they are not among them.
    """
    device = next((tensor.device for tensor in task.parameters()), torch.device("cpu"))
    for above, module in task.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            name = f"{above}.{leaf}".removeprefix(".")
            value = saved.get(name)
            if value is None:
                module._buffers[leaf] = None if name in empty else buffer
            elif buffer is None or buffer.shape != value.shape:
                module._buffers[leaf] = torch.empty_like(value, device=device)


def check_extra_state(task: nn.Module) -> None:
    """Try whether what each module returns in `get_extra_state` can be saved, and be given back to it.

    Raises:
        UserError: it cannot; the message names the module.
    """
    for name, module in task.named_modules():
        kind = type(module)
        if kind.get_extra_state is nn.Module.get_extra_state:
            continue
        try:
            module.set_extra_state(map_leaves(module.get_extra_state(), plain, (name or "model", EXTRA)))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{name or 'model'}: {kind.__name__}.set_extra_state cannot load what get_extra_state returns: "
                f"{error}. Checkpoints hold it as plain dicts, lists, tuples, tensors, numbers and text"
            ) from error


def frozen_checksums(task: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the checksums of these tensors of a task, made whole if they are sharded. Every process must call this."""
    state = task.state_dict()
    tensors = {name: state[name] for name in names if isinstance(state.get(name), Tensor)}
    return {name: f"{checksum(whole(tensor)):016x}" for name, tensor in tensors.items()}


def check_frozen(task: nn.Module, expected: Mapping[str, str], source: str) -> None:
    """Check that `task`, as it was built, holds the frozen tensors that a checkpoint leaves out.

    Args:
        expected: their checksums, of the checkpoint.
        source: the checkpoint, for the message.

    Raises:
        UserError: some of them are others now; the message names the first ones.
    """
    actual = frozen_checksums(task, expected)
    if wrong := [name for name in expected if actual.get(name) != expected[name]]:
        raise UserError(
            f"{source} leaves out {len(expected)} frozen tensors (checkpoint.frozen: false), and {len(wrong)} of them "
            f"are not what they were in training: {join_names(wrong)}.\n  They come from where the run took them: "
            "init_from, or what the constructors of model and task draw or load. Is that source the same file as then?"
        )


class Frozen:
    """Which tensors of a task are still as their source made them.

    Args:
        task: prepared, before a checkpoint is loaded.
        kept: `checkpoint.frozen`; if true, nothing is omitted.
    """

    def __init__(self, task: nn.Module, *, kept: bool) -> None:
        self._task = task
        self._first = {} if kept else self._now()

    def to_leave_out(self) -> dict[str, str]:
        """Return the checksums of the tensors that neither the optimizer nor the task has ever changed, by name.

        What a stage trained or a task moved (a teacher) is not among them. Every process must call this.
        """
        now = self._now() if self._first else {}
        return {name: value for name, value in self._first.items() if now.get(name) == value}

    def _now(self) -> dict[str, str]:
        """Return the checksums of what is not trained."""
        changing = {name for name, p in self._task.named_parameters(remove_duplicate=False) if p.requires_grad}
        changing |= own_buffers(self._task)
        return frozen_checksums(self._task, [name for name in self._task.state_dict() if name not in changing])
