"""Tensors that training leaves alone: `checkpoint.frozen: false` keeps them out of the files."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from common.base.errors import UserError
from common.checkpoint.checksum import checksum
from common.config.problem import join_names
from common.distributed import own_buffers
from common.distributed.collectives import whole


class Frozen:
    """Which tensors of a task are still as their source made them.

    Args:
        task: prepared, before a checkpoint is loaded.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task
        self._first = self._now()

    def to_leave_out(self) -> dict[str, str]:
        """Return the checksums of the tensors that neither the optimizer nor the task has ever changed, by name.

        What a stage trained or a task moved (a teacher) is not among them. Every process must call this.
        """
        now = self._now()
        return {name: value for name, value in self._first.items() if now.get(name) == value}

    def _now(self) -> dict[str, str]:
        """Return the checksums of what is not trained."""
        changing = own_buffers(self._task)
        for name, parameter in self._task.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                changing.add(name)
        return _checksums(self._task, [name for name in self._task.state_dict() if name not in changing])


def check_frozen(task: nn.Module, expected: Mapping[str, str], source: str) -> None:
    """Check that `task`, as it was built, holds the frozen tensors that a checkpoint leaves out.

    Args:
        expected: their checksums, of the checkpoint.
        source: the checkpoint, for the message.

    Raises:
        UserError: some of them are others now; the message names the first ones.
    """
    actual = _checksums(task, expected)
    wrong = [name for name in expected if actual.get(name) != expected[name]]
    if wrong:
        raise UserError(
            f"{source} leaves out {len(expected)} frozen tensors (checkpoint.frozen: false), and {len(wrong)} of them "
            f"are not what they were in training: {join_names(wrong)}.\n  They come from where the run took them: "
            "init_from, or what the constructors of model and task draw or load. Is that source the same file as then?"
        )


def _checksums(task: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the checksums of these tensors of a task, made whole if they are sharded. Every process must call this."""
    state = task.state_dict()
    found = {}
    for name in names:
        tensor = state.get(name)
        if isinstance(tensor, Tensor):
            found[name] = f"{checksum(whole(tensor)):016x}"
    return found
