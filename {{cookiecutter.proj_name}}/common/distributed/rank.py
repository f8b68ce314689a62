"""This process' place among those of the run: a small value, determined once and passed around."""

from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rank:
    """This process' place: `rank` of `world_size`, on its host `local_rank` of `local_world`, and its device.

    Attributes:
        backend: exchanges gradients, "nccl" or "gloo"; "" for a single process.
        launcher: the one that started the processes; "python" for none.
        address, port: where the processes find each other.
        launcher_hosts_store: the launcher listens at that address; otherwise rank 0 does.
        parent: id of the process that started this one, if it lives as long as the run; None for a shell.
        restarted: Slurm has started this job before, or torchrun these processes.
        launched_as: identifiers of this launch, the same after a restart.
        control: process group on CPU for small exchanges, which then never wait for the GPU.
        failure_monitor: ends this process when another one fails (`common.failure.monitor`); None before it exists.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    backend: str = ""
    launcher: str = "python"
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    launcher_hosts_store: bool = False
    parent: int | None = None
    restarted: bool = False
    launched_as: tuple[str, ...] = ()
    control: Any = None
    failure_monitor: Any = None

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and prints to the terminal."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"
