"""Calls functions with each saved checkpoint, in the background: uploads, copies to another disk."""

import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from loguru import logger

from common.base.files import warn_on_oserror
from common.checkpoint.file import link_file
from common.config.registry import AFTER_SAVE_REGISTRY

# How long the end of a run waits at most, by the signal that ended it; 0: none. Clusters kill a job 30 s after theirs.
_WAIT_S = {0: 600.0, signal.SIGINT: 1.0, signal.SIGTERM: 20.0}


@dataclass
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

    Meanwhile a newer file of the same name takes the place of the older one. A call that fails is logged, and not
    repeated: the next save brings a newer file.

    Args:
        section: names the function, with its arguments.
    """

    def __init__(self, section: str | Mapping[str, Any]) -> None:
        self._function = AFTER_SAVE_REGISTRY.build(section)
        name = section if isinstance(section, str) else section["type"]  # its arguments may be credentials
        self.what = f"checkpoint.after_save {name}"
        self._waiting: dict[str, Saved] = {}
        self._names = Queue[str]()
        threading.Thread(target=self._work, name="after_save", daemon=True).start()

    def add(self, path: Path, step: int) -> None:
        """Call the function with this file, once it has returned from those before."""
        link = path.with_name(f".{path.name}.{time.monotonic_ns()}.tmp")
        with warn_on_oserror(f"a link to {path.name} for checkpoint.after_save"):
            link_file(path, link)
            saved = Saved(link, path.name, step, path.parents[1])
            weakref.finalize(saved, link.unlink, missing_ok=True)
            self._waiting[path.name] = saved
            self._names.put(path.name)

    @property
    def is_busy(self) -> bool:
        """Whether a file is left."""
        return self._names.unfinished_tasks > 0

    def _work(self) -> None:
        while True:
            saved = self._waiting.pop(self._names.get(), None)  # None: a newer file of this name came first
            if saved is not None:
                try:
                    self._function(saved)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function can raise anything
                    why = f"{saved.name} of step {saved.step}: {type(error).__name__}: {error}"
                    logger.warning("{} failed with {}", self.what, why)
            del saved  # while this thread waits, nothing keeps the link
            self._names.task_done()


def finish(functions: Sequence[AfterSave], stopped_by: Callable[[], int]) -> None:
    """Wait until no file is left, for all functions together, not long after a signal.

    Args:
        stopped_by: returns the signal that has ended the run, or has arrived since then; 0 for none.
    """
    number = stopped_by()
    began = time.monotonic()
    while any(function.is_busy for function in functions):
        if time.monotonic() > began + _WAIT_S.get(number, _WAIT_S[signal.SIGTERM]):
            for function in functions:
                if function.is_busy:
                    logger.warning("{} did not finish and was abandoned", function.what)
            return
        time.sleep(0.1)
        if number != stopped_by():
            number = stopped_by()
            began = time.monotonic()
