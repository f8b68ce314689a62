"""Configuration of processes and randomness."""

from typing import Annotated, Literal

from pydantic import Field

from common.config import extensible_section


@extensible_section
class DistConfig:
    """Processes and randomness."""

    random_seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """global seed"""
    deterministic: Literal["off", "warn", "strict"] = "off"
    """strict: an operator without a deterministic version is an error; warn: a warning"""
    cudnn_benchmark: bool = False
    """let cuDNN time its algorithms; for fixed input sizes"""
    launcher: Literal["auto", "none", "spawn", "torchrun", "slurm", "mpi"] = "auto"
    """launcher whose environment variables to read; auto: detect; none: one process"""
    processes: Annotated[int | None, Field(ge=1)] = None
    """processes on this host; null: one per device"""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on CUDA, gloo on CPU"""
    timeout: Annotated[int, Field(ge=1)] = 600
    """seconds to wait for other processes, also at startup"""
    find_unused_parameters: bool = False
    """DDP: allow parameters that get no gradient"""
    static_graph: bool = False
    """DDP: assume that the graph never changes"""
    bucket_mb: Annotated[float, Field(gt=0)] = 25.0
    """DDP: size of a gradient bucket in MB"""
    broadcast_buffers: bool = True
    """train with rank 0's buffers (batch norm statistics), except own_buffers"""
    sync_bn: bool = False
    """batch norm statistics over all processes (CUDA only)"""

    @property
    def is_fixed(self) -> bool:
        """Whether a part sums gradients in an order that does not depend on the number of processes."""
        return False

    @property
    def is_sharded(self) -> bool:
        """Whether a part shards the model, so that each process holds a part of it."""
        return False
