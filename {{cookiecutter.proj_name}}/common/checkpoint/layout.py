"""The layout of a task's state: whether a freshly built task could load what this one saves."""

from loguru import logger
from torch import nn

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
        self._unsaved = _unsaved(task)
        self._warned = False

    def begin(self) -> None:
        """Note the buffers that no checkpoint holds, after a trial of the task and before the first step.

        Raises `UserError` as `check` does.
        """
        self.check()
        self._unsaved = _unsaved(self._task)

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

    def lost_buffers(self) -> list[str]:
        """Return the names of buffers that training has changed and no checkpoint holds; warns of them once."""
        names = sorted(name for name, _ in _unsaved(self._task).items() - self._unsaved.items())
        if names and not self._warned:
            self._warned = True
            logger.warning(
                "training has changed buffers that are not saved: {}. A resume begins with those of a model that was "
                "just built; unless each batch computes them, register them with persistent=True",
                join_names(names, _SHOWN),
            )
        return names


def _entries(task: nn.Module) -> dict[str, str]:
    """Return what a checkpoint holds, in words, by name."""
    entries = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        entries[name] = f"a parameter of shape {tuple(parameter.shape)}, {parameter.dtype}"
    for name, module, leaf, buffer in named_buffers(task):
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            entries[name] = f"a buffer of shape {tuple(buffer.shape)}, {buffer.dtype}"
    return entries


def _unsaved(task: nn.Module) -> dict[str, int]:
    """Return checksums of the buffers with `persistent=False`."""
    found = {}
    for name, module, leaf, buffer in named_buffers(task):
        if buffer is not None and leaf in module._non_persistent_buffers_set:
            found[name] = checksum(buffer)
    return found
