"""Which process of the run is this, and the few collectives. The rest of the project is given a `Rank`.

`launch` reads the launcher's variables, `rank` makes a `Rank` of them, `group` joins and leaves the process group,
`spawn` starts the processes where no launcher did.
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
from common.distributed.spawn import spawn

__all__ = [
    "DistConfig",
    "LaterMax",
    "Launch",
    "Rank",
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
