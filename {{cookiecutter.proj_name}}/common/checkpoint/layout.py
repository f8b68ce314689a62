"""The layout of a task's state: whether a task that is built anew could load what this one saves."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from common.base.errors import UserError
from common.base.nested import map_leaves
from common.checkpoint.checksum import checksum
from common.checkpoint.file import plain
from common.config.names import join_names
from common.distributed import buffer_kinds

EXTRA = "_extra_state"  # how torch ends the names of what `get_extra_state` returns
_SHOWN = 5


class Layout:
    """Kind, shape and type of each entry in the state of a task that was just built.

    Args:
        task: before a checkpoint is loaded and before the first step.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task
        self._modules = {name for name, _ in task.named_modules(remove_duplicate=False)}
        self._entries = _entries(task)
        self._unsaved = _unsaved(task)
        self._warned = False

    def begin(self) -> None:
        """Note the buffers that no checkpoint holds, after a trial of the task and before the first step.

        Raises `UserError` as `changed_buffers` does.
        """
        self.changed_buffers()
        self._unsaved = _unsaved(self._task)

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

    def changed_buffers(self) -> list[str]:
        """Return the names of buffers that appeared, vanished (are None), or changed shape or type since then.

        A checkpoint lists them, and `make_buffers` gives them to a task that is built anew.

        Raises:
            UserError: another entry changed, so that no checkpoint of this run could be loaded.
        """
        now, changed, wrong = _entries(self._task), [], []
        for name in sorted(now.keys() | self._entries.keys()):
            old, new = self._entries.get(name), now.get(name)
            if old == new:
                continue
            changed.append(name)
            is_buffer = all(entry[0] == "buffer" for entry in (old, new) if entry)
            is_known = name.rpartition(".")[0] in self._modules
            if not (is_buffer and is_known and (new or self._is_none(name))):
                wrong.append(f"  {name}: {_shown(old)} when the task was built, {_shown(new)} now")
        if wrong:
            more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            raise UserError(
                "a checkpoint of this run could not be loaded again, since a resume builds the task anew:\n"
                + "\n".join(wrong[:_SHOWN] + more)
                + "\n  Make modules and parameters in __init__, in their final shape. The optimizer does not train any "
                "that are made later. Only buffers may be registered later, begin as None, or change their shape."
            )
        return changed

    def _is_none(self, name: str) -> bool:
        """Return whether a module still has this buffer, as None."""
        path, _, leaf = name.rpartition(".")
        return any(above == path and leaf in part._buffers for above, part in self._task.named_modules())


def _entries(task: nn.Module) -> dict[str, tuple[str, Any, Any]]:
    parameters = dict(task.named_parameters(remove_duplicate=False))
    entries = dict[str, tuple[str, Any, Any]]()
    for name, value in task.state_dict().items():
        if not isinstance(value, Tensor) or name.endswith(EXTRA):
            continue  # loaded by the module's own code
        kind = "parameter" if name in parameters else "buffer"
        entries[name] = kind, None if is_lazy(value) else tuple(value.shape), value.dtype
    return entries


def _unsaved(task: nn.Module) -> dict[str, int]:
    """Return checksums of the buffers with `persistent=False`, except those that are saved for each process."""
    kinds, found = buffer_kinds(task), {}
    for above, module in task.named_modules():
        for leaf in sorted(module._non_persistent_buffers_set):
            name = f"{above}.{leaf}".removeprefix(".")
            buffer = getattr(module, leaf)
            if buffer is not None and kinds.get(name) != "rank":
                found[name] = checksum(buffer)
    return found


def _shown(entry: tuple[str, Any, Any] | None) -> str:
    if entry is None:
        return "absent"
    kind, shape, dtype = entry
    return f"a {kind} of shape {'unknown' if shape is None else shape}, {str(dtype).removeprefix('torch.')}"


def make_buffers(task: nn.Module, names: Collection[str], state: Mapping[str, Any]) -> None:
    """Give a task that was just built the buffers with these `names` as they are in `state`, to be loaded."""
    device = next((tensor.device for tensor in task.parameters()), torch.device("cpu"))
    parts = {"model": task.get_submodule("model"), "task": task}
    for name in names:
        path, _, leaf = name.rpartition(".")
        holder = "task" if name in state.get("task", {}) else "model"
        value = state[holder].get(name)
        for above, module in parts[holder].named_modules(remove_duplicate=False):
            if above == path and (leaf in module._buffers or not hasattr(module, leaf)):
                buffer = None if value is None else torch.empty_like(value, device=device)
                module.register_buffer(leaf, buffer)
                break


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
