"""Buffers of which each process has its own: how a module declares them; all others are those of rank 0."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config.problem import match_names
from common.distributed.launch import Rank


def named_buffers(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    """Yield the full name of each buffer of `model`, its module, its name there, and the tensor, which may be None."""
    for above, module in model.named_modules():
        for name, buffer in module._buffers.items():
            yield f"{above}.{name}".removeprefix("."), module, name, buffer


def own_buffers(model: nn.Module) -> set[str]:
    """Return the full names of the buffers that `model`'s modules declare in `own_buffers`; see docs/task.md.

    Raises:
        UserError: a name or pattern, relative to its module, matches no buffer.
    """
    own = set()
    for above, module in model.named_modules():
        patterns = getattr(module, "own_buffers", ())
        if patterns:
            names = list(dict(module.named_buffers()))
            for name in match_names(patterns, names, f"{type(module).__name__}.own_buffers"):
                own.add(f"{above}.{name}".removeprefix("."))
    return own


def keep_buffers(
    model: nn.Module,
    only: Collection[str] | None = None,
) -> Callable[[], None]:
    """Return a function that restores the buffers of `model`, or `only` those: the same tensors, the same values."""
    kept = []
    for name, module, attribute, buffer in named_buffers(model):
        if buffer is not None and (only is None or name in only):
            copy = buffer.detach().clone()
            kept.append((module, attribute, buffer, copy))

    @torch.no_grad()
    def restore() -> None:
        for module, attribute, buffer, copy in kept:
            buffer.copy_(copy)
            setattr(module, attribute, buffer)

    return restore


@contextmanager
def buffers_unchanged(
    model: nn.Module,
    only: Collection[str] | None = None,
) -> Iterator[None]:
    """Restore the buffers of `model`, or `only` those with these names, on exit, even after an error."""
    restore = keep_buffers(model, only)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # of a device that is lost: the first error says why
            restore()
        raise
    restore()


def share_buffers(model: nn.Module, rank: Rank) -> None:
    """Copy rank 0's buffers to all, but not each process' own: batch norm statistics drift apart between the ranks."""
    if rank.is_single_process:
        return
    own = own_buffers(model)
    buffers = []
    for name, buffer in model.named_buffers():
        if name not in own:
            buffers.append(buffer.detach())
    if buffers:
        # As in DDP: many buffers per broadcast, 25 MB at a time.
        dist._broadcast_coalesced(dist.group.WORLD, buffers, 25 << 20, 0)  # type: ignore[arg-type]
