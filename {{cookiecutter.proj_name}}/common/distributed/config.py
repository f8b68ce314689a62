"""Configuration of processes and randomness."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from common.base.parts import sections
from common.config import section


@section
class DistConfig:
    """Processes and randomness."""

    random_seed: Annotated[
        int | None, Field(ge=0, lt=2**63, description="global seed; null: a random one, which is recorded")
    ] = 42
    deterministic: Annotated[
        Literal["off", "warn", "strict"],
        Field(description="strict: an operator without a deterministic version is an error; warn: a warning"),
    ] = "off"
    cudnn_benchmark: Annotated[bool, Field(description="let cuDNN time its algorithms; for fixed input sizes")] = False
    launcher: Annotated[
        Literal["auto", "none", "spawn", "torchrun", "slurm", "mpi"],
        Field(description="launcher whose environment variables to read; auto: detect; none: one process"),
    ] = "auto"
    processes: Annotated[int | None, Field(ge=1, description="processes on this host; null: one per device")] = None
    distributed_backend: Annotated[
        Literal["auto", "nccl", "gloo"], Field(description="auto: nccl on CUDA, gloo on CPU")
    ] = "auto"
    timeout: Annotated[int, Field(ge=1, description="seconds to wait for other processes, also at startup")] = 600
    find_unused_parameters: Annotated[bool, Field(description="DDP: allow parameters that get no gradient")] = False
    static_graph: Annotated[bool, Field(description="DDP: assume that the graph never changes")] = False
    bucket_mb: Annotated[float, Field(gt=0, description="DDP: size of a gradient bucket in MB")] = 25.0
    broadcast_buffers: Annotated[
        bool, Field(description="train with rank 0's buffers (batch norm statistics), except own_buffers")
    ] = True
    sync_bn: Annotated[bool, Field(description="batch norm statistics over all processes (CUDA only)")] = False

    @property
    def is_fixed(self) -> bool:
        """Whether a part sums gradients in an order that does not depend on the number of processes."""
        return False

    @property
    def is_sharded(self) -> bool:
        """Whether a part shards the model, so that each process holds a part of it."""
        return False


if not TYPE_CHECKING:  # to the type checker, the core does not have the keys of parts
    DistConfig = section(sections(DistConfig))
