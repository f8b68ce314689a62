"""This process: its exit code, and the resources available to it."""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved, to be continued; a scheduler should start the job again


def available_cores() -> int:
    """Cores this process may use; under Slurm or in a container, often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def terminal_width() -> int:
    """Columns of the terminal that shows stderr; 100 without one."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 100
    except (OSError, ValueError, AttributeError):
        return 100


def die_with_parent(starter: int | None = None) -> None:
    """End this process when its parent is killed: an orphan would continue to train and save (Linux).

    Args:
        starter: the process that started this one, if known; it may be dead already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if starter is None else starter
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def stop_with_reader() -> Iterator[None]:
    """End the program silently when its output is no longer read: `... | head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here rather than when Python shuts down
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # it is another pipe that is broken, between the program's own processes
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
