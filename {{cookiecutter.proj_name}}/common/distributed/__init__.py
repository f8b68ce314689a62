"""This process' place among those of the run, and a few collectives. The rest of the project gets a `Rank`.

`launch` makes a `Rank` from the launcher's variables, `devices` adds the device, `group` joins and leaves the process
group, `spawn` starts the processes if no launcher did.
"""

from common.distributed.buffers import own_buffers, share_buffers
from common.distributed.collectives import (
    LaterMax,
    barrier,
    from_main,
    gather_objects,
    gather_to_main,
    group_hidden,
    main_first,
    max_over_ranks,
    sum_over_ranks,
)
from common.distributed.config import DistConfig
from common.distributed.devices import find_rank, has_streams
from common.distributed.group import check_alike, check_same, finish, start
from common.distributed.launch import Rank, is_launched
from common.distributed.spawn import spawn
