"""Configuration of processes and randomness."""

from typing import Annotated, Literal

from pydantic import Field

from common.config import section


@section
class DistConfig:
    """Processes and randomness."""

    random_seed: Annotated[
        int | None, Field(ge=0, lt=2**63, description="seed of everything; null: one is drawn and recorded")
    ] = 42
    deterministic: Annotated[
        Literal["off", "warn", "strict"],
        Field(description="strict: an operator without a deterministic version is an error; warn: it is named"),
    ] = "off"
    cudnn_benchmark: Annotated[bool, Field(description="let cuDNN time its algorithms; for inputs of one size")] = False
    launcher: Annotated[
        Literal["auto", "none", "spawn", "torchrun", "slurm", "mpi"],
        Field(description="launcher whose environment variables to read; auto: detect; none: one process"),
    ] = "auto"
    processes: Annotated[int | None, Field(ge=1, description="processes to start here; null: one per device")] = None
    distributed_backend: Annotated[
        Literal["auto", "nccl", "gloo"], Field(description="auto: nccl on CUDA, gloo on CPU")
    ] = "auto"
    timeout: Annotated[int, Field(ge=1, description="seconds to wait for other processes, at the start too")] = 600
    strategy: Annotated[
        Literal["ddp", "fsdp"],
        Field(description="ddp: each process holds the whole model; fsdp: a part of it, see prepare.fsdp"),
    ] = "ddp"
    find_unused_parameters: Annotated[bool, Field(description="DDP: allow parameters that get no gradient")] = False
    static_graph: Annotated[bool, Field(description="DDP: promise that the graph never changes")] = False
    bucket_mb: Annotated[float, Field(gt=0, description="DDP: megabytes of gradients exchanged together")] = 25.0
    gradient_as_bucket_view: Annotated[
        bool, Field(description="DDP: gradients lie in the memory they are exchanged from, which saves a copy")
    ] = True
    broadcast_buffers: Annotated[bool, Field(description="train with rank 0's buffers (batch norm statistics)")] = True
    sync_bn: Annotated[bool, Field(description="batch norm statistics over all processes (CUDA only)")] = False
