"""Messages between two processes: lines of JSON over a socket."""

import json
import os
import socket
import threading
from contextlib import suppress
from typing import Any


class Wire:
    """Lines of JSON over a socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.peer = ("?", 0)  # host and process id of the other side
        self.early: list[dict[str, Any]] = []  # what came together with the welcome
        self._rest = b""
        self._sending = threading.Lock()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # firewalls forget a line that is silent
        close_in_workers(connected)

    @property
    def unread(self) -> int:
        """Bytes that are not a whole message yet."""
        return len(self._rest)

    def send(self, **message: Any) -> None:
        """Send, or do nothing when the other side has gone."""
        with self._sending, suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come, after waiting for a piece of one; None when the other side has gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = []
        for line in lines:
            with suppress(ValueError, RecursionError):  # somebody else who found our port
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, dict)]


def close_in_workers(connected: socket.socket) -> None:
    """Keep a forked process (a loader's worker) from holding our end open after we have died."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=connected.close)
