"""A debugger for one of several processes."""

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
    """Stop here in `rank`, in pdb; the other processes wait until you continue. Every process must call this.

        from support import debug
        debug.breakpoint(rank=1)

    `continue` resumes all processes; so does `next`, but this one stops again at the next line; `quit` ends all. A
    single process stops whatever `rank` is. If a process never makes this call, the others wait for it for a week.
    """
    frame = sys._getframe(1)
    if torch.utils.data.get_worker_info() is not None:
        raise UserError("a loader worker has no terminal: debug data sets with --worker 0")
    alone = not dist.is_initialized()
    # The usual groups would time out after dist.timeout.
    patient = None if alone else dist.new_group(backend="gloo", timeout=timedelta(days=7))
    if alone or dist.get_rank() == rank:
        notice = "" if alone else f"rank {rank} stops here; the others wait"
        last_command = _inspect(frame, notice)
    if patient is not None:
        dist.barrier(group=patient)
        dist.destroy_process_group(patient)
    if (alone or dist.get_rank() == rank) and last_command in _STEPS:
        pdb.Pdb().set_trace(frame)


def _inspect(frame: FrameType, notice: str) -> str:
    """Run the debugger in `frame`. Returns the command that ended it."""
    # multiprocessing replaces stdin by os.devnull, but leaves the descriptor open.
    if sys.stdin is None or sys.stdin.name == os.devnull:
        sys.stdin = open(os.dup(0))  # noqa: SIM115 - for the rest of the process
    if notice:
        print(notice, file=sys.stderr, flush=True)
    debugger = pdb.Pdb()
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise UserError("ended in the debugger, by quit")
    return debugger.lastcmd.split()[0] if debugger.lastcmd else ""
