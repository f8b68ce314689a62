"""If one rank fails, all end: each has a connection to rank 0, which the kernel closes when a process dies.

A failing rank sends its reason to rank 0, which determines the first failure of the run and sends it to all; each
writes it to its own log, rank 0 also to the terminal, and ends within seconds, whatever it was waiting for. Nothing is
sent in normal operation, and a busy or suspended process keeps its connection: silence is not a failure.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, wait
from typing import NoReturn

from loguru import logger

from common.base.errors import UserError
from common.base.process import exit_code_of
from common.distributed import Rank, from_main
from common.failure.report import (
    ABSENT_HINT,
    ABSENT_TITLE,
    EXIT_ERROR,
    Failure,
    Whereabouts,
    explain_timeout,
    report_to_torchrun,
    where_now,
)

_POLL_S = 0.5
_CAUSE_WITHIN_S = 1.5  # after a likely consequence; without a cause by then, it counts as the cause itself
_FOUND_WITHIN_S = 3.0  # after a timeout, for the others to say where they are
_ANSWER_WITHIN_S = 5.0  # by rank 0, to a failed rank; longer than rank 0's own wait for a cause
# A launcher ends all processes when the first one ends, and reports that one as the cause. So the failed rank leaves
# rank 0 time to show the reason, then ends first.
_END_AFTER_S = 1.0
_FOLLOW_AFTER_S = 2.0
_END_AT_LATEST_S = 8.0  # even if something blocks: an unread terminal, a disk
_NO_MESSAGE = "the process exited without an error message"
_BYE = None  # the message of a rank that leaves after success
_WHERE = "where"  # rank 0's question to all, which they answer with their `Whereabouts`
_KILLED = (
    "killed by a user or the scheduler, out of memory (see dmesg), ended by os._exit or a library, or a crash in native"
    " code (python -X faulthandler shows where)"
)
_SILENT = "it does not answer: it is suspended, or native code holds Python's lock"

FailureSink = Callable[[Failure, bool], None]
"""Shows a failure: in this process' log and, if the second argument says so, on the terminal."""


def print_failure(failure: Failure, to_terminal: bool) -> None:
    """Print a failure: the sink as long as there is no log."""
    if not to_terminal:
        return
    text = failure.text()
    if not failure.is_boxed:
        text = f"error: {text}"
    print(text, file=sys.stderr)


class FailureMonitor:
    """Shows the failure that ends the run. This class is for a single process."""

    def __init__(self) -> None:
        self.sink: FailureSink = print_failure
        self._first: Failure | None = None  # of the whole run, as far as this process knows

    def fail(self, failure: Failure) -> None:
        """Show the first failure of the run. With several processes, this also ends the calling one."""
        self.sink(failure, True)
        report_to_torchrun(failure.text())

    def leave(self) -> None:
        """Announce success: from now on, a rank that ends has not failed."""


class _ConnectedMonitor(FailureMonitor):
    """Ends this process when another one fails, and the others when this one does."""

    def __init__(
        self,
        rank: Rank,
        connection: Connection,
        main_if_killed: Failure,
        hub: "_Hub | None",
    ) -> None:
        super().__init__()
        self.rank = rank
        self._connection = connection
        self._hub = hub
        self._main_if_killed = main_if_killed  # shown in that case
        self._has_left = False
        threading.Thread(target=self._listen, name="failure monitor", daemon=True).start()

    def fail(self, failure: Failure) -> None:
        _send(self._connection, failure)
        time.sleep(_ANSWER_WITHIN_S)  # the answer ends this process
        if self._first is None:
            self._end(failure, to_terminal=True)
        time.sleep(_END_AT_LATEST_S)

    def leave(self) -> None:
        self._has_left = True
        _send(self._connection, _BYE)
        if self._hub is not None:
            self._hub.send_to_all(_BYE)

    def _listen(self) -> None:
        """Wait for the first failure of the run, and end this process."""
        try:
            message = self._connection.recv()
            while message == _WHERE:
                _send(self._connection, where_now(self.rank))
                message = self._connection.recv()
            if message is not _BYE:
                self._end(message, to_terminal=self.rank.is_main)
        except (EOFError, OSError):
            if not self._has_left:
                self._end(_how_it_ended(self._main_if_killed), to_terminal=self.rank.rank == 1)

    def _end(self, failure: Failure, to_terminal: bool) -> NoReturn:
        """Show the first failure of the run, and end this process."""
        self._first = failure
        code = EXIT_ERROR
        delay = _FOLLOW_AFTER_S
        text = f"ended because another process failed: {failure.reason}"
        if failure.rank == self.rank.rank:
            code = failure.code
            delay = _END_AFTER_S
            text = failure.text()
        threading.Timer(_END_AT_LATEST_S, os._exit, (code,)).start()
        # The reason should be the last output, but the main thread may keep logging until the end.
        logger.disable("")
        logger.enable(__name__)
        with suppress(Exception):  # an error, such as a full disk, must not keep this process alive
            sys.stdout.flush()
            self.sink(failure, to_terminal)
            _silence()
        time.sleep(delay)
        report_to_torchrun(text)
        end(code)


class _Hub:
    """On rank 0: a connection to every rank, itself included. Determines the first failure, and sends it to all."""

    def __init__(self, server: socket.socket, key: bytes, world_size: int) -> None:
        self._server = server
        self._key = key
        self._world_size = world_size
        self._joined: list[int] = []  # the ranks
        self._members: dict[Connection, Failure] = {}  # with the failure to report if that rank is killed
        for target in (self._accept, self._watch):
            threading.Thread(target=target, name="failure hub", daemon=True).start()

    def _accept(self) -> None:
        self._server.settimeout(_POLL_S)
        while len(self._joined) < self._world_size:
            with suppress(OSError):
                client, _ = self._server.accept()
                client.setblocking(True)
                # A thread each: another program that connects and says nothing keeps no rank waiting.
                connection = _close_in_workers(Connection(client.detach()))
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
        self._server.close()

    def _admit(self, connection: Connection) -> None:
        with suppress(OSError, EOFError):  # another program
            if connection.recv_bytes(len(self._key)) == self._key:
                self._members[connection] = if_killed = connection.recv()
                self._joined.append(if_killed.rank)
                return
        connection.close()

    def _watch(self) -> None:
        """Send the first failure to all: at once, or a little later if another failure may be its cause."""
        suspect: Failure | None = None
        decide_at = float("inf")
        found: dict[int, Failure] = {}  # by rank
        while time.monotonic() < decide_at:
            for connection in wait(list(self._members), _POLL_S):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    message = _how_it_ended(self._members.pop(connection))
                if message is _BYE:
                    del self._members[connection]
                elif isinstance(message, Whereabouts):
                    found.setdefault(message.rank, message)
                elif not message.may_follow:
                    self.send_to_all(message)
                    return
                else:
                    found[message.rank] = message
                    if suspect is None:
                        suspect = message
                        decide_at = time.monotonic() + _CAUSE_WITHIN_S
                        if message.is_timeout:
                            decide_at = time.monotonic() + _FOUND_WITHIN_S
                            self.send_to_all(_WHERE)
        if suspect is not None and suspect.is_timeout:
            suspect = self._explained(suspect, found)
        self.send_to_all(suspect)

    def _explained(self, suspect: Failure, found: dict[int, Failure]) -> Failure:
        """Return the report of a timeout, given where the other ranks are; some have not answered."""
        for other in self._members.values():
            silent = replace(other, title=ABSENT_TITLE, trace=_SILENT, hint=ABSENT_HINT)
            found.setdefault(other.rank, silent)
        del found[suspect.rank]
        return explain_timeout(suspect, [found[rank] for rank in sorted(found)])

    def send_to_all(self, message: Failure | str | None) -> None:
        for connection in list(self._members):
            _send(connection, message)


def connect(rank: Rank) -> FailureMonitor:
    """Connect every rank to rank 0. Every process must call this right after joining the process group."""
    if rank.is_single_process:
        return FailureMonitor()
    if_killed = Failure(rank.rank, rank.world_size, EXIT_ERROR, _NO_MESSAGE, hint=_KILLED)
    hub = None
    offer = (if_killed, 0, b"")
    address = interface = "127.0.0.1"
    if rank.local_world < rank.world_size:  # on several hosts
        address = rank.address
        interface = ""  # any
    if rank.is_main:
        key = secrets.token_bytes(16)
        server = socket.create_server((interface, 0), backlog=rank.world_size)
        os.register_at_fork(after_in_child=server.close)
        hub = _Hub(server, key, rank.world_size)
        offer = (if_killed, server.getsockname()[1], key)
    main_if_killed, port, key = from_main(offer, rank)
    try:
        connection = _close_in_workers(Client((address, port)))
    except OSError as error:
        raise UserError(
            f"rank {rank.rank} cannot reach rank 0 at {address}:{port}, a port that it chose: {error}"
        ) from None
    connection.send_bytes(key)
    connection.send(if_killed)
    return _ConnectedMonitor(rank, connection, main_if_killed, hub)


def _how_it_ended(failure: Failure) -> Failure:
    """Add the exit code or the signal to the report of a process that ended without a word, if it was on this host."""
    if failure.host != socket.gethostname():
        return failure
    code = exit_code_of(failure.pid)
    if code is None:
        return failure
    how = f"with exit code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    return replace(failure, title=f"{_NO_MESSAGE}, {how}")


def end(code: int) -> NoReturn:
    """End this process at once, without any cleanup that could deadlock with other processes."""
    with suppress(Exception):
        logger.complete()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _send(connection: Connection, message: Failure | str | None) -> None:
    """Send a message; does nothing if the other side has closed."""
    with suppress(OSError):
        connection.send(message)


def _close_in_workers(connection: Connection) -> Connection:
    """Keep a forked process (a loader's worker) from holding the connection open when this process is killed."""
    os.register_at_fork(after_in_child=connection.close)
    return connection


def _silence() -> None:
    """Discard all further output, from any thread or library."""
    logger.remove()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
