"""This process: its exit code, and the resources available to it."""

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_UNREAD_MS = 2000
_MOST_FILES = 1 << 20  # some programs look at each number up to the limit when they start
# Those that end a run. A terminal, Slurm, torchrun and `kill -- -GROUP` send them to all its processes at once.
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved, to be continued; a scheduler should start the job again


def available_cores() -> int:
    """Cores this process may use: under Slurm or with a CPU quota (`docker --cpus`), often fewer than there are."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return min([cores, *_cpu_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _cpu_quotas(groups: Path, mounted: Path) -> Iterator[int]:
    """Yield the CPU quotas of this process' control group and of those that contain it, rounded up to whole cores.

    Args:
        groups: lists the groups of this process: `0::/path` in version 2, the only one that is read.
        mounted: the folder of all groups.
    """
    if not groups.is_file():
        return
    for line in groups.read_text().splitlines():
        # In a container, the path may be that on the host, and the container's own group the one at the top.
        group = mounted / line.removeprefix("0::/")
        while line.startswith("0::") and group.is_relative_to(mounted):
            with suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = map(int, (group / "cpu.max").read_text().split())
                yield -(-quota // period)
            group = group.parent


def raise_file_limit() -> None:
    """Allow this process, and those that it starts, as many open files as the system permits; often 1,024 at first.

    Tensors from loader workers arrive as open files, and processes are connected to each other.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES
    if 0 <= hard < wanted:
        wanted = hard
    if 0 <= soft < wanted:  # without a limit, -1 on Linux and a large number on macOS
        with suppress(OSError, ValueError):  # macOS has another limit too
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def die_with_parent(starter: int | None = None) -> None:
    """End this process when its parent is killed: an orphan would continue to train and save (Linux).

    Args:
        starter: the process that started this one, if known; it may be dead already.
    """
    if not sys.platform.startswith("linux"):
        return
    if starter is None:
        starter = os.getppid()
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != starter:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of a process of this host that has just ended, negative for a signal; None if unknown.

    Linux keeps the code until the parent process asks for it.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    is_ending = int(fields[6]) & 0x4  # PF_EXITING of proc(5)'s field `flags`
    if not is_ending:
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def drop_unread_output() -> bool:
    """Connect standard output and error to /dev/null where nothing can be written for two seconds.

    For a pipe whose reader has stopped reading. Returns whether there was one.
    """
    dropped = False
    for descriptor in (1, 2):
        output = select.poll()
        output.register(descriptor, select.POLLOUT)
        if not output.poll(_UNREAD_MS):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            dropped = True
    return dropped
