"""Tensors that training leaves alone: `checkpoint.frozen: false` keeps them out of the files."""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import shake_128

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from common.base.errors import UserError
from common.config.problem import join_names
from common.distributed import own_buffers
from common.distributed.collectives import whole
from common.distributed.seed import mix

_CHUNK = 1 << 16  # numbers multiplied at a time: these products stay in the cache of a CPU


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


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64 bits that depend on every bit of a tensor and on where it is, computed on its device, the same on any.

    A CPU checks 0.7 GB/s. Floating point numbers count in 32 bits, so a model has the same one in any precision.
    """
    value = tensor.detach()
    if value.is_floating_point():
        value = value.float()
    data = value.contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 4:
        data = pad(data, (0, -len(data) % 4))
    factors = _factors(value.device)
    sums = []
    for words in data.view(torch.int32).split(_CHUNK):
        sums.append((words * factors[: len(words)]).sum())  # in 64 bits: in 32, two changed signs cancel each other
    return mix(*value.shape, *torch.stack(sums).tolist())


@cache
def _factors(device: torch.device) -> Tensor:
    """Random numbers that no version of PyTorch or NumPy changes, since checksums are stored."""
    data = bytearray(shake_128(b"").digest(8 * _CHUNK))
    return torch.frombuffer(data, dtype=torch.int64).to(device)
