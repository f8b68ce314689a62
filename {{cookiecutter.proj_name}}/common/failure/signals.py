"""Signals: recorded on arrival, handled between two steps, by all processes at the same step."""

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from loguru import logger

from common.base.process import EXIT_REQUEUE, STOP_SIGNALS, drop_unread_output
from common.distributed import LaterMax, Rank

# Slurm sends one of these before the time limit, if requested (--signal); they have no other predefined meaning.
_REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_SAME_CTRL_C_S = 1.0  # one Ctrl-C arrives twice: from the terminal, and forwarded by the launcher
_EXCHANGE_EVERY_S = 0.2
_WAIT_FOR_BATCH_S = 60.0  # after a signal: several ranks decide together, and save, a step or two later
_MAX_INTERVAL = 100  # steps
_early: list[int] = []  # signals that arrived before the loop started


def catch_early_signals() -> None:
    """Hold a requeue signal until the loop starts; by default it would kill a process that is still starting."""
    for number in _REQUEUE_SIGNALS:
        signal.signal(number, lambda number, frame: _early.append(number))


def exit_code(number: int) -> int:
    """Return the exit code of a run that signal `number` stopped; 0 for none."""
    if number in _REQUEUE_SIGNALS:
        return EXIT_REQUEUE
    if number:
        return 128 + number
    return 0


class StopDecision(NamedTuple):
    """The agreement of the ranks between two steps: the signal to stop by (0: none), and whether to save."""

    stop: int
    save: bool


_NOTHING = StopDecision(stop=0, save=False)


class StopSignals:
    """Turns signals into a request that the loop reads between two steps.

    The handler only records the signal: saving inside a handler could interrupt anything, even another save. A second
    Ctrl-C exits at once.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._is_alone = rank.is_single_process
        self.signal = 0
        self._noted_at = 0.0
        self._exchange: LaterMax | None = None  # started in the previous step
        self._exchanged_at = time.monotonic()
        self._interval = 1  # steps from that exchange to the next
        self._steps_left = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals while training; afterwards the previous handlers are restored.

        Under a launcher ours stay: it forwards the signals of its group, so a second one may arrive during shutdown.
        """
        before = {}
        for number in STOP_SIGNALS:
            # Under nohup, a lost terminal does not stop the run.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, self._note)
        self.signal = self.signal or max(_early, default=0)
        self._noted_at = time.monotonic()
        _early.clear()
        try:
            yield
        finally:
            if self.rank.parent is None:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            if time.monotonic() > self._noted_at + _SAME_CTRL_C_S:
                raise KeyboardInterrupt
        # Slurm's SIGTERM at the time limit follows its SIGUSR1, and must not downgrade a requeue request to a stop.
        elif self.signal not in _REQUEUE_SIGNALS or number == signal.SIGINT:
            if not self.signal:  # in another thread: the code that this interrupts may hold a lock of the log
                _thread.start_new_thread(self._announce, (number,))
            self._noted_at = time.monotonic()  # first: a copy of the same Ctrl-C may arrive after the next line
            self.signal = number

    def _announce(self, number: int) -> None:
        if drop_unread_output():
            self._noted_at = time.monotonic()  # what follows is no second Ctrl-C
            for thread in threading.enumerate():  # writes that wait for a reader are tried again, into nothing
                if thread.ident is not None:
                    signal.pthread_kill(thread.ident, number)
        again = ""
        if number == signal.SIGINT:
            again = "; press Ctrl-C again to exit at once"
        logger.warning("{}: stopping after this step, then saving{}", signal.Signals(number).name, again)

    def stops_waiting(self) -> int:
        """Return the signal once waiting for a batch must end, else 0. A single process stops waiting at once."""
        if not self._is_alone and time.monotonic() < self._noted_at + _WAIT_FOR_BATCH_S:
            return 0
        return self.signal

    def sync(self, save: bool) -> StopDecision:
        """Return whether any rank received a signal, or requests a save. Called once per step, by all ranks.

        Several ranks exchange this about five times a second, and read the result one step later, so no rank waits for
        it: an exchange in each step cost 6 % at 10 ms per step, with one core per process.
        """
        if self._is_alone:
            if self.signal or save:
                return StopDecision(self.signal, save)
            return _NOTHING
        decision = _NOTHING
        self._steps_left -= 1
        if self._exchange is not None:
            stop, wants_save, self._interval = self._exchange.read()
            decision = StopDecision(stop, bool(wants_save))
            self._exchange = None
            self._steps_left = self._interval - 1
        if self._steps_left <= 0:
            now = time.monotonic()
            fitting = int(self._interval * _EXCHANGE_EVERY_S / (now - self._exchanged_at))
            # At most doubled: the first steps say little about those that follow.
            interval = max(1, min(fitting, 2 * self._interval, _MAX_INTERVAL))
            wants_save = int(save and not decision.save)
            self._exchange = LaterMax([self.signal, wants_save, interval], self.rank)
            self._exchanged_at = now
        return decision
