"""Buffers that each process changes: how a module declares them, and how the ranks share them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.base.errors import UserError
from common.config.names import match_names
from common.distributed.collectives import gather_objects
from common.distributed.rank import Rank

_KINDS = ("sum", "gather", "rank")


def named_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the full name of each buffer of `model`, the module that owns it, its name there, and the tensor."""
    for above, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{above}.{name}".removeprefix("."), module, name, buffer


def buffer_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kinds of the buffers that `model`'s modules declare in `buffer_kinds`, by full name; see docs/task.md.

    Raises:
        UserError: a kind does not exist, or a name or pattern, relative to its module, matches no buffer.
    """
    kinds: dict[str, str] = {}
    for above, module in model.named_modules():
        declared = getattr(module, "buffer_kinds", {})
        names = [name for name, _ in module.named_buffers()] if declared else []
        for pattern, kind in declared.items():
            key = f"{type(module).__name__}.buffer_kinds"
            if kind not in _KINDS:
                raise UserError(f"{key}: {pattern}: {kind!r} must be one of {', '.join(_KINDS)}")
            kinds |= {f"{above}.{name}".removeprefix("."): kind for name in match_names([pattern], names, key)}
    return kinds


class SharedBuffers:
    """Shares the declared buffers of a task at the end of each step: `begin`, the step's batches, `finish`.

    Attributes:
        kinds: of all declared buffers, by name.

    Raises:
        UserError: a declaration is wrong, or a `sum` buffer holds no numbers.
    """

    def __init__(self, task: nn.Module, rank: Rank) -> None:
        self._rank = rank
        self.kinds = buffer_kinds(task)
        kinds = [(self.kinds.get(name), module, attribute) for name, module, attribute, _ in named_buffers(task)]
        self._shared = [item for item in kinds if item[0] in ("sum", "gather")]
        self._before: list[Tensor] = []
        for kind, module, name in self._shared:
            if kind == "sum" and getattr(module, name).dtype == torch.bool:
                raise UserError(f"{type(module).__name__}.buffer_kinds: {name} is bool, which has no sum; use integers")

    @property
    def are_shared(self) -> bool:
        """Whether there are any whose changes all ranks must know."""
        return bool(self._shared)

    def begin(self) -> None:
        """Remember the buffers as they are on all ranks alike."""
        self._before = [getattr(module, name).detach().clone() for _, module, name in self._shared]

    def finish(self, *, taken: bool) -> None:
        """Give every rank what all ranks changed since `begin`. Every process must call this.

        `taken`: whether the optimizer step was taken; if not, what the step appended to `gather` buffers is dropped,
        since `after_step`, which would use it, is not called.
        """
        for (kind, module, name), old in zip(self._shared, self._before, strict=True):
            buffer = getattr(module, name).detach()
            if kind == "gather":
                if len(buffer) < len(old):
                    raise UserError(
                        f"{type(module).__name__}.{name}: a gather buffer grows by what each batch appends, but it has "
                        f"{len(buffer)} rows after a step and had {len(old)} before; shorten it in after_step"
                    )
                rows = _gather_rows(buffer[len(old) :], self._rank) if taken else buffer[:0]
                setattr(module, name, torch.cat([old, rows]))
            elif not self._rank.is_single_process:
                change = buffer - old
                dist.all_reduce(change)
                buffer.copy_(old + change)


def keep_buffers(model: nn.Module, only: Collection[str] | None = None) -> Callable[[], None]:
    """Return a function that restores the buffers of `model`, or `only` those: the same tensors, the same values."""
    kept = [
        (module, attribute, buffer, buffer.detach().clone())
        for name, module, attribute, buffer in named_buffers(model)
        if only is None or name in only
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, attribute, buffer, before in kept:
            setattr(module, attribute, buffer.copy_(before))

    return restore


@contextmanager
def buffers_unchanged(model: nn.Module, only: Collection[str] | None = None) -> Iterator[None]:
    """Restore the buffers of `model`, or `only` those with these names, on exit, even after an error."""
    restore = keep_buffers(model, only)
    try:
        yield
    finally:
        restore()


def share_buffers(model: nn.Module, rank: Rank) -> None:
    """Copy rank 0's buffers to all, but not declared ones: batch norm statistics drift apart between the ranks."""
    if rank.is_single_process:
        return
    declared = buffer_kinds(model)
    buffers = [buffer.detach() for name, buffer in model.named_buffers() if name not in declared]
    if buffers:
        # As in DDP: many buffers per broadcast, 25 MB at a time.
        dist._broadcast_coalesced(dist.group.WORLD, buffers, 25 << 20, 0)  # type: ignore[attr-defined, arg-type]


def _gather_rows(rows: Tensor, rank: Rank) -> Tensor:
    """Gather the rows of all ranks, (N, ...): the first row of each, then the second of each, as samples are dealt."""
    parts = gather_objects(rows.cpu(), rank)
    turns = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(parts)[turns.argsort(stable=True)].to(rows.device)
