"""A debugger in one process of several."""

import os
import pdb
import sys
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
import torch.utils.data

from common.base.errors import UserError

_STEPS = ("n", "next", "s", "step", "unt", "until", "r", "return")


def breakpoint(rank: int = 0) -> None:
    """Stop here, in `rank`, with pdb; the other processes wait, for as long as it takes. All must come by.

        from common import debug
        debug.breakpoint(rank=1)

    `continue` lets all go on, `next` too, but stops at the following line; `quit` ends them all. In a single process it
    stops where it is, whatever `rank` says. Put it where every process comes by: one that does not is waited for, for
    a week.
    """
    frame = sys._getframe(1)
    if torch.utils.data.get_worker_info() is not None:
        raise UserError("a worker of the loader has no terminal: debug data sets with --worker 0")
    alone = not dist.is_initialized()
    # The usual groups would give up after dist.timeout.
    patient = None if alone else dist.new_group(backend="gloo", timeout=timedelta(days=7))
    if alone or dist.get_rank() == rank:
        told = "" if alone else f"rank {rank} stops here; the others wait"
        go_on_to = _inspect(frame, told)
    if patient is not None:
        dist.barrier(group=patient)
        dist.destroy_process_group(patient)
    if (alone or dist.get_rank() == rank) and go_on_to in _STEPS:
        pdb.Pdb().set_trace(frame)


def _inspect(frame: FrameType, told: str) -> str:
    """Let the user look around; the command that ended it."""
    if (
        sys.stdin is None or sys.stdin.name == os.devnull
    ):  # multiprocessing takes it away; the descriptor is still there
        sys.stdin = open(os.dup(0))  # noqa: SIM115 - for the rest of the process
    if told:
        print(told, file=sys.stderr, flush=True)
    debugger = pdb.Pdb()
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise UserError("ended in the debugger, by quit")
    return debugger.lastcmd.split()[0] if debugger.lastcmd else ""
