"""Calls functions with each saved checkpoint, in the background: uploads, copies to another disk."""

import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from common.checkpoint.file import link_file
from common.config.registry import AFTER_SAVE_REGISTRY

_LONGEST_PAUSE_S = 300.0
# After the training; the files are in the run's folder in any case. Clusters kill a job 30 s after their signal.
_LAST_TRY_S, _LAST_CALL_S, _AFTER_SIGNAL_S, _AFTER_CTRL_C_S = 60.0, 600.0, 20.0, 1.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        path: the file to read: a second link, which later saves leave as it is. It is removed with this object.
        name: what the file is called in the run's folder: latest.pt, best.pt, step_00000200.pt.
        step: optimizer steps done.
        run: the run's folder.
    """

    path: Path
    name: str
    step: int
    run: Path


class AfterSave:
    """Calls one function with one file after the other, in a thread of its own. Training never waits for it.

    If a call fails, it is repeated after 1, 2, 4, ... seconds, at most 300. Meanwhile a newer file of the same name
    takes the place of the older one.

    Args:
        section: names the function, with its arguments.
    """

    def __init__(self, section: str | Mapping[str, Any]) -> None:
        self._function = AFTER_SAVE_REGISTRY.build(section)
        self._what = f"checkpoint.after_save, {section if isinstance(section, str) else section['type']}"
        self._waiting: dict[str, Saved] = {}
        self._changed, self._pause, self._until = threading.Condition(), 0.0, float("inf")
        self._thread = threading.Thread(target=self._work, name="after_save", daemon=True)
        self._thread.start()

    def add(self, path: Path, step: int) -> None:
        """Call the function with this file, once it has returned from those before."""
        link = path.with_name(f".{path.name}.{time.monotonic_ns()}.tmp")
        link_file(path, link)
        saved = Saved(link, path.name, step, path.parents[1])
        weakref.finalize(saved, link.unlink, missing_ok=True)
        with self._changed:
            self._waiting[path.name] = saved
            self._changed.notify()

    def finish(self, stopped_by: Callable[[], int] = lambda: 0) -> None:
        """Wait until no file is left. Failures are retried for a minute, but not after a signal.

        Args:
            stopped_by: returns the signal that has ended the run, or has arrived since then; 0 for none.
        """
        number, began = stopped_by(), time.monotonic()
        with self._changed:
            self._pause, self._until = 0.0, began + (not number) * _LAST_TRY_S
            self._changed.notify()
        self._thread.join(_AFTER_CTRL_C_S)
        if self._thread.is_alive() and number != signal.SIGINT:
            logger.info("waiting for {}, {:.0f} s at most", self._what, _longest(number))
        while self._thread.is_alive() and time.monotonic() < began + _longest(number):
            self._thread.join(0.1)
            if number != (number := stopped_by()):
                began = time.monotonic()
        if self._thread.is_alive():
            logger.warning("{} did not finish and was abandoned", self._what)

    def _next(self) -> Saved | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pause, self._pause)
            self._changed.wait_for(lambda: self._waiting or self._until < float("inf"))
            return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def _work(self) -> None:
        for saved in iter(self._next, None):
            try:
                self._function(saved)
                self._pause = 0.0
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function can raise anything
                self._pause = min(max(1.0, 2 * self._pause), _LONGEST_PAUSE_S)
                is_last = time.monotonic() + self._pause > self._until
                then = "training has ended: not retried" if is_last else f"next try in {self._pause:.0f} s"
                self._pause *= not is_last
                why = f"{saved.name} of step {saved.step}: {type(error).__name__}: {error}"
                logger.warning("{} failed with {}; {}", self._what, why, then)
                if not is_last:
                    self._waiting.setdefault(saved.name, saved)
            del saved  # while this thread waits, nothing keeps the link


def _longest(stopped_by: int) -> float:
    """Return for how long the end of a run waits, at most, after this signal; 0: after none."""
    return {0: _LAST_CALL_S, signal.SIGINT: _AFTER_CTRL_C_S}.get(stopped_by, _AFTER_SIGNAL_S)
