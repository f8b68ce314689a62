"""What this part adds to the configuration: `dist.strategy`, `dist.shard_size` and `prepare.fsdp`."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from common.config import Problem, section

SAFE = (
    "dist.strategy", "dist.shard_size", "prepare.fsdp.blocks", "prepare.fsdp.reshard_after_forward",
    "prepare.fsdp.cpu_offload",
)  # fmt: skip
"""Keys of which a resume accepts new values."""


@section
class FsdpConfig:
    """With dist.strategy fsdp: how weights, gradients and optimizer state are sharded over the processes.

    To save, the first process gathers all of them in its host memory.
    """

    blocks: list[str] = field(default_factory=list)
    """modules gathered one at a time, as in "layers.*"; without any, the whole model at once"""
    reshard_after_forward: bool = True
    """free gathered weights until the backward pass"""
    param_dtype: Literal["auto", "bf16", "own"] = "auto"
    """format of computation; auto: bf16 with precision.mode bf16 and no batch norm, else own"""
    cpu_offload: bool = False
    """keep weights and optimizer state in host memory: slow"""


@section
class PrepareConfig:
    """The key that this part adds to the section `prepare`."""

    fsdp: FsdpConfig = field(default_factory=FsdpConfig)

    @property
    def gathered(self) -> list[str]:
        """Modules whose weights are gathered one at a time."""
        return self.fsdp.blocks


@section
class DistConfig:
    """The keys that this part adds to the section `dist`."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each process holds the whole model; fsdp: a part of it, see prepare.fsdp"""
    shard_size: Annotated[int | None, Field(ge=2)] = None
    """fsdp: processes that share one copy of the model (HSDP); null: all"""

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model."""
        return self.strategy == "fsdp"


def problems(config: Any) -> Iterator[Problem]:
    """Yield what does not go with sharded weights, and what needs them."""
    if not config.dist.is_sharded:
        if config.dist.shard_size:
            rule = "needs dist.strategy fsdp"
            yield Problem("dist.shard_size", config.dist.shard_size, rule, "ddp: each process holds it all")
        return
    if config.prepare.channels_last:
        rule = "dist.strategy fsdp needs contiguous weights"
        yield Problem("prepare.channels_last", True, rule, "turn it off, or use ddp")
    if config.dist.is_fixed:
        rule = "does not work with dist.strategy fsdp, which computes with parts of the model"
        yield Problem("dist.reduction", "fixed", rule, "use ddp")
    for number, stage in enumerate(getattr(config, "stages", ())):
        if stage.freeze:
            rule = "dist.strategy fsdp cannot change which weights are trained"
            hint = "use ddp, or prepare.freeze for the whole run"
            yield Problem(f"stages[{number}].freeze", stage.freeze, rule, hint)
