"""How a run ends: on request, on a mistake of the user, or on an error. Always with a reason and an exit code."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from common.dist import Rank, max_over_ranks
from common.errors import UserError
from common.located import with_notes

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


class TrainingError(UserError):
    """Training cannot go on, for a reason that a traceback would only hide (a loss that is not a number, ...)."""


def die_with_parent() -> None:
    """End this process when the one that started it is killed: an orphan would go on training and saving (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before the call
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Asked:
    """What the processes agreed on between two steps: the signal to stop by (0: none), and whether to save."""

    stop: int
    save: bool


_NOTHING = Asked(stop=0, save=False)


class Requests:
    """Turns SIGINT and SIGTERM into a request that the loop looks at between two steps.

    The handler only notes the signal: saving inside a handler would interrupt anything, a save included. A second
    Ctrl-C leaves at once.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals while training; afterwards the handlers are as they were."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number

    def agree(self, save: bool) -> Asked:
        """One tiny exchange per step: whether any process was told to stop, or wants to save (the last save is old)."""
        asked = max_over_ranks(2 * self.signal + save, self.rank)
        return Asked(asked // 2, asked % 2 == 1) if asked else _NOTHING


@contextmanager
def reported() -> Iterator[None]:
    """Around a whole program: a mistake of the user is printed without a traceback, and the exit code is never 0."""
    try:
        yield
    except UserError as error:
        print(f"error: {with_notes(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
