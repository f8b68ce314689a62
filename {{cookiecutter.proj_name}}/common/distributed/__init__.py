"""This process' place among those of the run, and a few collectives. The rest of the project gets a `Rank`.

`launch` makes a `Rank` from the launcher's variables, `devices` adds the device, `group` joins and leaves the process
group, `spawn` starts the processes if no launcher did.
"""

from common.distributed.buffers import SharedBuffers, buffer_kinds, share_buffers
from common.distributed.collectives import (
    LaterMax, barrier, from_main, gather_objects, gather_to_main, main_first, max_over_ranks, sum_over_ranks,
)  # fmt: skip
from common.distributed.config import DistConfig
from common.distributed.devices import find_rank
from common.distributed.group import check_alike, check_same, finish, start
from common.distributed.launch import is_launched
from common.distributed.rank import Rank
from common.distributed.spawn import spawn

__all__ = [
    "DistConfig", "LaterMax", "Rank", "SharedBuffers", "barrier", "buffer_kinds", "check_alike", "check_same",
    "find_rank", "finish", "from_main", "gather_objects", "gather_to_main", "is_launched", "main_first",
    "max_over_ranks", "share_buffers", "spawn", "start", "sum_over_ranks",
]  # fmt: skip
