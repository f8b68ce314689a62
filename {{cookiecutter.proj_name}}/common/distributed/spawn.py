"""Start this host's processes ourselves, if several devices are requested and no launcher was used."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore

from common.base.process import STOP_SIGNALS
from common.distributed.config import DistConfig
from common.distributed.devices import GpuIds, host_devices
from common.distributed.launch import SPAWNED, read_launch

_GRACE_S = 8.0  # for the others to end by themselves once one has failed
_POLL_S = 0.1


def spawn(
    gpu_ids: GpuIds,
    config: DistConfig,
    argv: Sequence[str],
) -> int | None:
    """Run this program once per device, as torchrun would, and wait for the processes.

    Args:
        argv: the program and its arguments, as in `sys.argv`.

    Returns:
        The exit code of the run: that of the first process that failed, 128 + signal for one that was killed. None
        if this process should do the work itself: one device, or a launcher has started it.
    """
    if config.launcher not in ("auto", "spawn"):
        return None
    if read_launch(os.environ, config.launcher) is not None:
        return None
    count = len(host_devices(gpu_ids, config.processes))
    if count == 1:
        return None
    # On a free port; it outlives rank 0. A socket of ours, as PyTorch's own would listen on every address of the host.
    server = socket.create_server(("127.0.0.1", 0))
    host, port = server.getsockname()
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=config.timeout),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    shared = {
        **os.environ,
        SPAWNED: str(os.getpid()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
    }
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), *argv]  # type: ignore[attr-defined]
    children = []
    arrived = []  # signals not yet forwarded to the processes
    before = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and the processes should too
            before[number] = signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        for rank in range(count):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(subprocess.Popen(command, env=environment))
        return _wait(children, arrived)
    finally:
        for child in children:
            child.kill()  # does nothing if it has ended
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(child: "subprocess.Popen[bytes]") -> int | None:
    """Return the exit code of a process, negative for a signal; None while it runs. Other processes can still read it.

    `poll` alone would remove it from the system (Linux; macOS has none to be read).
    """
    if child.returncode is not None or not hasattr(os, "waitid"):
        return child.poll()
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status
    return -ended.si_status


def _wait(children: Sequence["subprocess.Popen[bytes]"], arrived: list[int]) -> int:
    """Wait for all, and forward signals; when one fails, only `_GRACE_S` longer.

    Returns:
        The exit code of the run: that of the process that failed first.
    """
    codes: list[int | None] = [None]
    failed: int | None = None  # the rank
    until = float("inf")
    while None in codes and time.monotonic() < until:
        time.sleep(_POLL_S)
        codes = [_exit_code(child) for child in children]
        for rank, code in enumerate(codes):
            if code and failed is None:
                failed = rank
                until = time.monotonic() + _GRACE_S
        while arrived:  # the terminal sends Ctrl-C to the processes as well; two within a second count as one
            number = arrived.pop(0)
            for child in children:
                child.send_signal(number)  # does nothing if it has ended
    if failed is None:
        return 0
    code = codes[failed] or 0
    if code > 0:
        return code
    hint = ""
    if -code == signal.SIGKILL:
        hint = "; did the machine run out of memory (see dmesg)?"
    print(f"error: rank {failed} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr)
    return 128 - code
