"""One rank of many without the others: torch's fake process group, whose collectives end at once and change nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from common.base.errors import UserError
from common.distributed.config import DistConfig
from common.distributed.devices import GpuIds, host_devices
from common.distributed.launch import read_launch
from common.distributed.rank import Rank


@contextmanager
def simulated_rank(gpu_ids: GpuIds, config: DistConfig) -> Iterator[Rank]:
    """Be rank `dist.rank` of `dist.simulate` processes in this context, as if all others had the same values.

    Raises:
        UserError: there is no such rank, several processes were asked for or started, or a device does not exist.
    """
    world = config.simulate or 1
    if config.rank >= world:
        raise UserError(f"dist.rank: {config.rank}, but the ranks of --dist.simulate {world} are 0 to {world - 1}")
    if config.processes is not None or read_launch(os.environ) is not None:
        raise UserError(
            f"dist.simulate: one process simulates {world}; start it with python train.py, and leave out dist.processes"
        )
    devices = host_devices(gpu_ids, None)
    rank = Rank(config.rank, config.rank % len(devices), world, devices[0], "fake", "none", len(devices))
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank.rank, world_size=world)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def keep_own_gradients(model: DistributedDataParallel) -> None:
    """Have DDP keep this rank's gradients: the fake group returns no sum, for which DDP would wait."""

    def unchanged(state: None, bucket: GradBucket) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, unchanged)
