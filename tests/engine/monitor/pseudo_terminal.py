"""Programs in a terminal of a given width."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.conftest import ENVIRONMENT, PROJECT

_AT_MOST_S = 120
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Shown:
    """What a program wrote to its terminal, and its exit code."""

    raw: str
    code: int

    @property
    def lines(self) -> list[str]:
        """As read: without escape codes, every state of the progress bar as a line of its own."""
        return [line for line in re.split(r"[\r\n]+", _ESCAPE.sub("", self.raw)) if line.strip()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def in_terminal(
    command: Sequence[str],
    columns: int,
    answer: Callable[[str], str] = lambda shown: "",
    variables: Mapping[str, str] | None = None,
) -> Shown:
    """Run a program to its end in a terminal.

    Args:
        answer: called with the output so far, whenever there is more; returns keys to press.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("NO_COLOR", "SLURM_JOB_ID")}
    process = subprocess.Popen(
        command, cwd=PROJECT, env={**environment, **(variables or {})}, stdin=child, stdout=child, stderr=child,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    timer = threading.Timer(_AT_MOST_S, process.kill)
    timer.start()
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 4096):
            shown += block
            os.write(parent, answer(shown.decode(errors="replace")).encode())
    except OSError:  # Linux reports the closed end so
        pass
    finally:
        timer.cancel()
        process.kill()
        os.close(parent)
    return Shown(shown.decode(), process.wait())
