"""How a run ends: on request, on a mistake of the user, or on an error. Always with a reason and an exit code."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

from common import distributed
from common.base.errors import UserError
from common.distributed import DistConfig, LaterMax, Rank
from common.failure.lifeline import connect, end, print_failure
from common.failure.report import EXIT_ERROR, EXIT_INTERRUPTED, describe, report_to_torchrun

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved, to be continued; a scheduler should start the job again

# Slurm sends one of these before the time limit, if asked to (--signal), and they mean nothing else to a program.
_COME_AGAIN = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_STOPPING = (signal.SIGINT, signal.SIGTERM, *_COME_AGAIN)
_HANG_UP = getattr(signal, "SIGHUP", None)  # the terminal is closed, or the connection to it lost
_joined = False  # whether this process was one of several
_early = 0  # a signal to come again that arrived before there was a loop to stop
_ONCE = 1.0  # seconds in which a second Ctrl-C is still the first: sent to a group of processes, and handed on in it


class TrainingError(UserError):
    """Training cannot go on, for a reason that a traceback would only hide (a loss that is not a number, ...).

    Attributes:
        elsewhere: another rank has the cause and reports it too; this one waits for that report.
    """

    elsewhere = False


@contextmanager
def together(rank: Rank, config: DistConfig, values: Mapping[str, Any]) -> Iterator[Rank]:
    """Join the other processes, work inside, and leave with them; when one fails, all end, and its reason is shown.

    Args:
        values: settings that must be the same on all processes.

    Raises:
        UserError: the processes did not find each other, or were started with different settings.
    """
    global _joined
    for number in _COME_AGAIN if _is_main_thread() else ():  # else it would end a process that is still starting
        signal.signal(number, _note_early)
    if rank.parent is not None:
        die_with_parent(rank.parent)
    rank = distributed.start(rank, config)
    rank = replace(rank, lifeline=connect(rank))
    _joined = not rank.is_alone
    try:
        distributed.check_alike(values, rank)
        yield rank
        distributed.finish(rank)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not rank.is_alone:
            rank.lifeline.fail(describe(error, rank))  # ends this process
        raise
    rank.lifeline.leave()


def stopping_signals() -> list[int]:
    """Those that a run is stopped by. Under nohup, a hang-up is not one of them."""
    if _HANG_UP is None or signal.getsignal(_HANG_UP) == signal.SIG_IGN:
        return list(_STOPPING)
    return [*_STOPPING, _HANG_UP]


def _is_main_thread() -> bool:
    """Whether this is the only thread that Python lets listen to signals, and delivers them to."""
    return threading.current_thread() is threading.main_thread()


def _note_early(number: int, frame: FrameType | None) -> None:
    global _early
    _early = number


def die_with_parent(starter: int | None = None) -> None:
    """End this process when the one that started it is killed: an orphan would go on training and saving (Linux).

    Args:
        starter: that process, where it is known; it may have been killed before this process came here.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent or not (starter is None or _is_there(starter)):  # it was killed before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@dataclass(frozen=True)
class StopDecision:
    """What the processes agreed on between two steps: the signal to stop by (0: none), and whether to save."""

    stop: int
    save: bool


_PAUSE = 0.2  # seconds between two questions whether to stop
_FIRST = 100  # steps that ask each time, and the most that never ask
_NOTHING = StopDecision(stop=0, save=False)


class StopSignals:
    """Turns signals (`stopping_signals`) into a request that the loop looks at between two steps.

    The handler only notes the signal: saving inside a handler would interrupt anything, a save included. A second
    Ctrl-C leaves at once.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.signal = 0
        self._since = 0.0  # when it came
        self._asked: LaterMax | None = None
        self._wait = 0  # calls until the next question
        self._calls = 0
        self._start = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals while training; afterwards the handlers are as they were.

        But not where a launcher waits for this process to end: it hands on what its group got, and the second of two
        may come while everything is being closed.
        """
        global _early
        if not _is_main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in stopping_signals()}
        self.signal, _early = self.signal or _early, 0
        try:
            yield
            if self._asked is not None:
                self._asked.read()
        finally:
            for number, handler in before.items() if self.rank.parent is None else ():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            if time.monotonic() > self._since + _ONCE:
                raise KeyboardInterrupt
            return
        # Slurm's SIGTERM at the time limit follows its SIGUSR1, and must not make "come again" of it "go away".
        if self.signal not in _COME_AGAIN or number == signal.SIGINT:
            self.signal, self._since = number, time.monotonic()

    def sync(self, save: bool) -> StopDecision:
        """Whether any process was told to stop, or wants to save (the last save is old). Called once a step.

        Several processes ask one another about five times a second, and read the answer a step later, so that nobody
        waits for it: an exchange in each step cost 6 % of steps of 10 ms, on as many cores as processes.
        """
        if self.rank.is_alone:
            return StopDecision(self.signal, save) if self.signal or save else _NOTHING
        answer = _NOTHING
        self._calls += 1
        if self._asked is None:
            self._wait -= 1
        else:
            stop, wanted, steps = self._asked.read()
            self._asked, self._wait = None, steps - 1
            if stop or wanted:
                answer = StopDecision(stop, wanted == 1)
        if self._wait <= 0:
            # The clock of one process is enough: it says when to save, and after how many steps all ask again.
            save = save and self.rank.is_main and not answer.save
            self._asked = LaterMax([self.signal, int(save), self._steps_to_go()], self.rank)
        return answer

    def _steps_to_go(self) -> int:
        """Steps until the next question. The first ones tell nothing about the pace, so then it is asked in each."""
        if not self.rank.is_main:
            return 1
        if self._calls <= _FIRST:
            self._start = time.monotonic()
            return 1
        seconds = (time.monotonic() - self._start) / (self._calls - _FIRST)
        return max(1, min(_FIRST, int(_PAUSE / seconds)))


def exit_code(number: int) -> int:
    """What a run that was stopped by signal `number` ends with; 0 for none."""
    if number in _COME_AGAIN:
        return EXIT_REQUEUE
    return 128 + number if number else 0


def leave(code: int) -> NoReturn:
    """End the program. Call it last, when everything is written."""
    if _joined:
        # gloo's threads may still hold Python objects, and abort the process when they free them while Python shuts
        # down: one run in four. Collecting garbage before makes it rare; on a busy machine it was still seen.
        end(code)
    sys.exit(code)


@contextmanager
def reported() -> Iterator[None]:
    """Around a whole program: an error is told in a way that helps, and the exit code is never 0."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
    except Exception as error:  # noqa: BLE001 - whatever it is
        failure = describe(error, Rank())
        with suppress(BrokenPipeError):
            print_failure(failure, True)
        report_to_torchrun(failure.text())
        sys.exit(failure.code)
