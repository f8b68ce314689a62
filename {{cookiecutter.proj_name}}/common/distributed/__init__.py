"""This process' place among those of the run, and a few collectives. The rest of the project gets a `Rank`.

`launch` makes a `Rank` from the launcher's variables, `devices` adds the device, `group` joins and leaves the process
group, `spawn` starts the processes if no launcher did.
"""

from common.distributed.buffers import SharedBuffers as SharedBuffers
from common.distributed.buffers import buffer_kinds as buffer_kinds
from common.distributed.buffers import share_buffers as share_buffers
from common.distributed.collectives import LaterMax as LaterMax
from common.distributed.collectives import barrier as barrier
from common.distributed.collectives import from_main as from_main
from common.distributed.collectives import gather_objects as gather_objects
from common.distributed.collectives import gather_to_main as gather_to_main
from common.distributed.collectives import group_hidden as group_hidden
from common.distributed.collectives import main_first as main_first
from common.distributed.collectives import max_over_ranks as max_over_ranks
from common.distributed.collectives import sum_over_ranks as sum_over_ranks
from common.distributed.config import DistConfig as DistConfig
from common.distributed.devices import find_rank as find_rank
from common.distributed.devices import has_streams as has_streams
from common.distributed.group import check_alike as check_alike
from common.distributed.group import check_same as check_same
from common.distributed.group import finish as finish
from common.distributed.group import start as start
from common.distributed.launch import is_launched as is_launched
from common.distributed.rank import Rank as Rank
from common.distributed.spawn import spawn as spawn
