"""One process fails, all end: a connection from every rank to rank 0, whose best use is that it breaks.

A rank that fails says so and why; one that is killed cannot, but the kernel closes its connections. Either way rank 0
shows it and tells the others, who end within seconds, whatever they were waiting for. Nothing is sent while all is
well, and a process that is merely busy or stopped keeps its connections: silence is never taken for death.
"""

import os
import secrets
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from common.distributed import Rank, from_main
from common.distributed.network import own_address
from common.failure.report import Failure, position, report_to_torchrun, vanished
from common.failure.wire import Wire, close_in_workers

_LINGER = 2.0  # seconds between hearing of another's failure and ending: the launcher should see the culprit end first
_LAST_LINE = 0.05  # seconds for a line that another thread is just writing
_SHOWING = 3.0  # seconds for showing a failure, before the others are told all the same
_AT_MOST = 8.0  # seconds from hearing of a failure to the end, whatever blocks: a terminal that nobody reads, a disk
_ANSWER = 5.0  # seconds to wait for rank 0's word; longer than it may be asking around
_ASKING = 1.5  # seconds to wait for the other ranks' word on where they are
_MOST_FROM_STRANGERS = 4096  # bytes from somebody who has not shown the token
_CONNECT = 5.0  # seconds for each address of rank 0 that is tried

Tell = Callable[[Failure, bool], None]
"""Shows a failure: in this process' log, and if the second argument says so, on the terminal."""


def print_failure(failure: Failure, aloud: bool, details: Path | None = None) -> None:
    """How a failure is told before there is a log. `details`: the file that holds its traceback."""
    if aloud:
        print(f"{'' if failure.is_boxed else 'error: '}{failure.text(details)}", file=sys.stderr)


class NoLifeline:
    """For a single process."""

    is_over = False

    def __init__(self) -> None:
        self.tell: Tell = print_failure

    def fail(self, failure: Failure) -> None:
        """Tell it. There is nobody else to end."""
        self.tell(failure, True)
        report_to_torchrun(failure.text())

    def leave(self) -> None:
        """There is nobody to take leave of."""


class Lifeline(ABC):
    """Ends this process when another one fails, and the others when this one does."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.tell: Tell = print_failure
        self._first: Failure | None = None  # of the whole run, as far as this process knows
        self._left = False
        self._answered = threading.Event()  # rank 0 has shown the first failure

    def fail(self, failure: Failure) -> None:
        """See to it that the first failure of all is shown, and end this process. Does not return."""
        if failure.may_follow:
            self._answered.wait(_ANSWER)  # for the word on whom it follows
        if self._first is None:
            self._report(failure)
        self._answered.wait(_ANSWER)
        if not self._answered.is_set():
            self._show(failure, aloud=True)
        first = self._first or failure  # as rank 0 has shown it: with the places of the other ranks
        if first.rank != self.rank.rank:
            time.sleep(_AT_MOST)  # `_end_soon` ends this process before
        report_to_torchrun(first.text())
        end(1 if failure.may_follow else failure.code)

    @property
    def is_over(self) -> bool:
        """Whether the run has failed: what goes wrong from now on is of no interest."""
        return self._first is not None

    @abstractmethod
    def leave(self) -> None:
        """All went well: from now on the others may end as they like."""

    @abstractmethod
    def _report(self, failure: Failure) -> None:
        """Let rank 0 know; `_answered` is set when it does."""

    def _show(self, failure: Failure, aloud: bool) -> None:
        self._first = failure
        _soon(_AT_MOST, os._exit, failure.code if failure.rank == self.rank.rank else 1)
        # It is to be the last thing that is seen, and the main thread may be busy, and talkative, until the end.
        logger.disable("")
        logger.enable(__name__)
        time.sleep(_LAST_LINE)
        with suppress(Exception):  # a full disk, say, must not keep this process alive
            sys.stdout.flush()
            self.tell(failure, aloud)
            _fall_silent()

    def _end_soon(self, failure: Failure) -> None:
        """End after another's failure, from a thread of its own: the main one may be waiting for ever."""
        if failure.rank != self.rank.rank:
            _soon(_LINGER, self._follow, failure)

    def _follow(self, first: Failure) -> None:
        report_to_torchrun(f"ended because another process failed: {first.reason}")
        end(1)


class _Main(Lifeline):
    """Rank 0's end: hears of the first failure, shows it, tells all."""

    def __init__(self, rank: Rank, server: socket.socket, token: str) -> None:
        super().__init__(rank)
        self._server, self._token = server, token
        self._members: dict[Wire, dict[str, Any]] = {}
        self._deciding = threading.Lock()
        self._suspect: Failure | None = None  # what may only follow from another's end, or from its silence
        self._until = 0.0
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def leave(self) -> None:
        self._left = True
        self._tell_all(bye=True)

    def _tell_all(self, **message: Any) -> None:
        for wire in list(self._members):
            wire.send(**message)

    def _report(self, failure: Failure) -> None:
        """The first failure to come here is the cause, and later ones follow; but for a suspect, ask around first."""
        with self._deciding:
            if self._first is not None:
                return
            if failure.may_follow:
                if self._suspect is None:
                    self._suspect, self._until = failure, time.monotonic() + _ASKING
                    if failure.rank != self.rank.rank:
                        failure.others.append(f"rank 0 is at {position()}")
                    self._tell_all(where=True)
                return
            told = failure.to_dict()
            late = _soon(_SHOWING, lambda: self._tell_all(failure=told))
            self._show(failure, aloud=True)
            late.cancel()
            self._tell_all(failure=told)
            self._answered.set()
        self._end_soon(failure)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=_ASKING / 3):
                    if key.fileobj is self._server:
                        with suppress(OSError):  # gone again already
                            wire = Wire(self._server.accept()[0])
                            selector.register(wire.socket, selectors.EVENT_READ, wire)
                    elif not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        key.data.socket.close()
                if self._suspect is not None and time.monotonic() > self._until:
                    suspect, self._suspect = self._suspect, None
                    self._report(replace(suspect, may_follow=False))

    def _hear(self, wire: Wire) -> bool:
        """Take in what came; False when that was the last of it."""
        messages = wire.receive()
        for message in messages or ():
            if message.get("token") == self._token:
                self._members[wire] = message
                wire.send(welcome=True, host=socket.gethostname(), pid=os.getpid())
                if self._first is not None:  # it comes late
                    wire.send(failure=self._first.to_dict())
            elif wire not in self._members:
                continue
            elif "failure" in message:
                self._report(Failure(**message["failure"]))
            elif "at" in message and self._suspect is not None:
                self._suspect.others.append(f"rank {self._members[wire]['rank']} is at {message['at']}")
            elif "bye" in message:
                del self._members[wire]
        if messages is None and (member := self._members.pop(wire, None)) is not None and not self._left:
            self._report(vanished(member["rank"], self.rank.world_size, member["host"], member["pid"]))
        is_stranger = wire not in self._members and wire.unread > _MOST_FROM_STRANGERS
        return messages is not None and not is_stranger


class _Member(Lifeline):
    """Any other rank's end."""

    def __init__(self, rank: Rank, wire: Wire | None) -> None:
        super().__init__(rank)
        self._wire = wire
        if wire is not None:
            threading.Thread(target=self._listen, args=(wire,), name="lifeline", daemon=True).start()

    def leave(self) -> None:
        self._left = True
        if self._wire is not None:
            self._wire.send(bye=True)

    def _report(self, failure: Failure) -> None:
        if self._wire is not None:
            self._wire.send(failure=failure.to_dict())

    def _listen(self, wire: Wire) -> None:
        messages: list[dict[str, Any]] | None = wire.early
        while messages is not None:
            for message in messages:
                if "failure" in message and not self._answered.is_set():
                    failure = Failure(**message["failure"])
                    self._show(failure, aloud=False)
                    self._answered.set()
                    self._end_soon(failure)
                elif "where" in message:
                    wire.send(at=position())
                elif "bye" in message:
                    return
            messages = wire.receive()
        if not self._left and not self._answered.is_set():
            # Nobody is left to speak for all, so the next rank does.
            failure = vanished(0, self.rank.world_size, *wire.peer)
            self._show(failure, aloud=self.rank.rank == 1)
            self._answered.set()
            self._end_soon(failure)


def connect(rank: Rank) -> Lifeline | NoLifeline:
    """Tie all ranks together. Every process must call this, right after joining."""
    if rank.is_alone:
        return NoLifeline()
    if rank.is_main:
        several_hosts = rank.local_world < rank.world_size
        server = socket.create_server(("" if several_hosts else "127.0.0.1", 0), backlog=rank.world_size)
        close_in_workers(server)
        token = secrets.token_hex(16)
        hosts = ["127.0.0.1"]
        if several_hosts:
            hosts = [own_address(rank.address) or "", rank.address, socket.gethostname()]
        from_main((hosts, server.getsockname()[1], token), rank)
        return _Main(rank, server, token)
    hosts, port, token = from_main(([""], 0, ""), rank)
    for host in filter(None, hosts):
        if wire := _reach(host, port, token=token, rank=rank.rank, host=socket.gethostname(), pid=os.getpid()):
            return _Member(rank, wire)
    tried = ", ".join(filter(None, hosts))
    logger.warning("rank {} cannot reach rank 0 (tried {}, port {}): it will hear late of failures", rank, tried, port)
    return _Member(rank, None)


def _reach(address: str, port: int, /, **hello: Any) -> Wire | None:
    """A connection to rank 0 at `address`; None when nobody, or somebody else, answers there."""
    try:
        connected = socket.create_connection((address, port), timeout=_CONNECT)
    except OSError:
        return None
    wire = Wire(connected)
    wire.send(**hello)
    first, *wire.early = wire.receive() or [{}]
    if "welcome" not in first:
        connected.close()
        return None
    wire.peer = (first["host"], first["pid"])
    connected.settimeout(None)
    return wire


def _soon(seconds: float, call: Callable[..., None], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _fall_silent() -> None:
    """What is still said from here on, by whatever thread or library, and in whatever way, goes nowhere."""
    logger.remove()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def end(code: int) -> None:
    """End this process now: no goodbyes, which would wait for processes that wait for this one."""
    with suppress(Exception):
        logger.complete()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
