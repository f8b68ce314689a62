"""The layout of a task's state: whether a freshly built task could load what this one saves."""

import torch
from loguru import logger
from torch import Tensor, nn

from common.base.errors import UserError
from common.checkpoint.checksum import checksum
from common.config.problem import join_names
from common.distributed.buffers import named_buffers

EXTRA = "_extra_state"  # how torch ends the names of what `get_extra_state` returns
_SHOWN = 5


class Layout:
    """Parameters and buffers of a task that was just built, as every checkpoint of it must have them.

    Args:
        task: before a checkpoint is loaded and before the first step.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task
        self._entries = _entries(task)
        self._unsaved = _unsaved(task)  # what is made later is a cache, such as a map of attention
        self._checksums = self._read()
        self._warned = False

    def begin(self) -> None:
        """Note the tensors that no checkpoint holds, after a trial of the task and before the first step.

        Raises `UserError` as `check` does.
        """
        self.check()
        self._checksums = self._read()

    def check(self) -> None:
        """Raise `UserError` if a freshly built task could not load the state of this one."""
        now = _entries(self._task)
        changed = {name for name, _ in now.items() ^ self._entries.items()}
        if not changed:
            return
        lines = ["a checkpoint of this run could not be loaded again, since a resume builds a fresh task:"]
        for name in sorted(changed)[:_SHOWN]:
            old = self._entries.get(name, "absent")
            lines.append(f"  {name}: {old} when the task was built, {now.get(name, 'absent')} now")
        lines.append(
            "  Make modules, parameters and buffers in __init__, in their final shape. The optimizer does not train "
            "parameters that are made later."
        )
        raise UserError("\n".join(lines))

    def lost_tensors(self) -> list[str]:
        """Return the names of tensors that training has changed and no checkpoint holds; warns of them once."""
        names = sorted(name for name, _ in self._read().items() - self._checksums.items())
        if names and not self._warned:
            self._warned = True
            logger.warning(
                "training has changed tensors that are not saved: {}. A resume begins with those of a model that was "
                "just built; unless each batch computes them, make them persistent buffers: register_buffer",
                join_names(names, _SHOWN),
            )
        return names

    def _read(self) -> dict[str, int]:
        """Return checksums of the tensors that no checkpoint holds, by name."""
        found = {}
        for name, module, leaf in self._unsaved:
            value = getattr(module, leaf, None)
            if isinstance(value, Tensor) and value.layout == torch.strided:
                found[name] = checksum(value)
        return found


def _entries(task: nn.Module) -> dict[str, str]:
    """Return what a checkpoint holds, in words, by name."""
    entries = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        entries[name] = f"a parameter of shape {tuple(parameter.shape)}, {parameter.dtype}"
    for name, module, leaf, buffer in named_buffers(task):
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            entries[name] = f"a buffer of shape {tuple(buffer.shape)}, {buffer.dtype}"
    return entries


def _unsaved(task: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return where tensors are that no checkpoint holds: the full name, the module, the name there.

    These are buffers with `persistent=False`, and plain attributes, unless a hook may compute them (weight norm).
    """
    found = []
    for above, module in task.named_modules():
        names = set(module._non_persistent_buffers_set)
        if not module._forward_pre_hooks:
            names.update(name for name, value in vars(module).items() if isinstance(value, Tensor))
        for name in names:
            found.append((f"{above}.{name}".removeprefix("."), module, name))
    return found
