"""Who am I among the processes of this run, and how do we talk? The rest of the project gets a `Rank` and asks nothing.

`launch` reads what the launcher said, `rank` makes a `Rank` of it, `group` joins and leaves, `collectives` are the few
exchanges we need, `spawn` starts processes where no launcher did.
"""

from common.distributed.collectives import (
    LaterMax,
    barrier,
    from_main,
    gather_objects,
    gather_tensors,
    gather_to_main,
    main_first,
    max_over_ranks,
    share_buffers,
    sum_over_ranks,
)
from common.distributed.config import DistConfig
from common.distributed.group import check_alike, check_same, finish, start
from common.distributed.launch import Launch, is_launched, read_launch
from common.distributed.rank import Rank, find_rank
from common.distributed.spawn import available_cores, spawn

__all__ = [
    "DistConfig",
    "LaterMax",
    "Launch",
    "Rank",
    "available_cores",
    "barrier",
    "check_alike",
    "check_same",
    "find_rank",
    "finish",
    "from_main",
    "gather_objects",
    "gather_tensors",
    "gather_to_main",
    "is_launched",
    "main_first",
    "max_over_ranks",
    "read_launch",
    "share_buffers",
    "spawn",
    "start",
    "sum_over_ranks",
]
