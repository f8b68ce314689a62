"""Starting the processes of this host ourselves, where several devices are wanted and no launcher was used."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.base.process import available_cores
from common.distributed.config import DistConfig
from common.distributed.launch import SPAWNED, read_launch
from common.distributed.rank import GpuIds, processes_wanted

_GRACE_S = 8.0  # for the others to end by themselves once one has failed
_POLL_S = 0.1


def spawn(gpu_ids: GpuIds, config: DistConfig, argv: Sequence[str]) -> int | None:
    """Run this very program once per device, as torchrun would, and wait for the processes.

    Args:
        argv: the program and its arguments, as in `sys.argv`.

    Returns:
        The exit code of the run: that of the first process that failed, 128 + signal for one that was killed. None
        when this process is itself to do the work: one device, or a launcher has started it.
    """
    if config.launcher not in ("auto", "spawn") or read_launch(os.environ, config.launcher) is not None:
        return None
    count = processes_wanted(gpu_ids, config, Path(argv[0]).name)
    if count == 1:
        return None
    # On a free port; it still listens when rank 0 has died.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    shared = {
        **os.environ,
        SPAWNED: str(os.getpid()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # By default each would start as many threads as there are cores.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // count)))
    children: list[subprocess.Popen[bytes]] = []
    with _listening(children) as signals:
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(subprocess.Popen([sys.executable, *_interpreter_flags(), *argv], env={**shared, **place}))
        return _wait(children, signals)


def _interpreter_flags() -> list[str]:
    """Python's own options, such as -u, -O or -X dev: what stands before the program."""
    words, found = iter(sys.orig_argv[1:]), list[str]()
    for word in words:
        # Several letters may share a dash. X and W take a value, as the rest of the word or the next one.
        option = re.fullmatch(r"-[bBdEIOPqRsSuvx]*([XW].+|[XW]?)", word)
        if option is None or word == "-":
            break
        found += [word, next(words)] if option[1] in ("X", "W") else [word]
    return found


def _wait(children: Sequence["subprocess.Popen[bytes]"], signals: list[int]) -> int:
    """Until all have ended; when one fails, the others have `_GRACE_S` to follow. Signals are passed on."""
    first: int | None = None
    until = float("inf")
    while None in (codes := [child.poll() for child in children]):
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and first is None:
            first, until = failed[0], time.monotonic() + _GRACE_S
        if time.monotonic() > until:
            for child in children:
                child.kill()
        while signals:
            number = signals.pop(0)
            for child in children:
                child.send_signal(number)  # which does nothing when it has ended
        time.sleep(_POLL_S)
    if first is None:
        first = next((rank for rank, code in enumerate(codes) if code), 0)
    code = codes[first] or 0
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = "; did the machine run out of memory (see dmesg)?" if name == "SIGKILL" else ""
    print(f"error: rank {first} was ended by {name}{hint}", file=sys.stderr)
    return 128 - code


@contextmanager
def _listening(children: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[int]]:
    """Collect signals for the processes, which know how to stop; a terminal has sent Ctrl-C to them already.

    They are passed on when all of the processes exist: one that was just being started would miss them.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not (number == signal.SIGINT and (os.name == "nt" or _at_terminal())):
            arrived.append(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield arrived
    except BaseException:
        for child in children:
            child.kill()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _at_terminal() -> bool:
    """Whether a Ctrl-C goes to the whole group of processes: we are in the foreground of a terminal."""
    try:
        with open("/dev/tty") as terminal:  # not stdin, which may be a file
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
