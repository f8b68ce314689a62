"""The log: on the terminal, and with source locations in a file."""

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from loguru import logger as logger  # evaluate.py imports it from here: `common` reports missing packages
from tqdm import tqdm

from common.base.files import Appender

_FILE = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <7} {name!s: >26}:{line: <4} {message}"
_early: deque[str] = deque(maxlen=1000)  # lines logged before the run folder exists; they belong in the run's file too


def setup_log(
    level: str = "INFO",
    *,
    rank: int = 0,
    file: Appender | None = None,
) -> None:
    """Send every record of loguru, of `logging` and of `warnings` to the terminal and to `file`.

    Call it first for the terminal alone, and again when the run folder exists: lines logged in between are then added
    to the file. Ranks above 0 send only errors to the terminal; give each of them its own file.

    Args:
        level: the lowest level shown, one of loguru's names.
    """
    number = logger.level(level).no
    logger.remove()
    # diagnose would print the values of variables (data, passwords) in tracebacks.
    options: dict[str, Any] = {"diagnose": False, "backtrace": False}
    shown = level
    sender = ""
    if rank:
        shown = "ERROR"
        sender = f"rank {rank}: "
    # Before the terminal, which may be unread.
    write: Callable[[Any], None] = _early.append
    if file is not None:
        file.write("".join(_early))
        write = file.write
    _early.clear()
    logger.add(write, level=level, format=_FILE, **options)
    logger.add(
        _to_console,
        level=shown,
        format="<green>{time:HH:mm:ss}</green> <level>{level: <8}</level> " + sender + "{message}",
        colorize=sys.stderr.isatty() and "NO_COLOR" not in os.environ,
        **options,
    )
    logging.basicConfig(handlers=[_ToLoguru()], force=True)
    # At DEBUG libraries log a great deal (Pillow: a line for each block of a PNG).
    logging.getLogger().setLevel(max(number, logging.INFO))
    logging.captureWarnings(True)


def _to_console(message: str) -> None:
    """Write above the progress bar, if there is one."""
    if getattr(tqdm, "_instances", None):
        tqdm.write(message, file=sys.stderr, end="")
    else:
        sys.stderr.write(message)


class _ToLoguru(logging.Handler):
    """Forwards records of the standard library's `logging`, and of `warnings`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:  # a level of the library's own
            level = record.levelno
        try:
            message = record.getMessage().rstrip()
            # Passed as an argument: braces in the text must not be taken for format fields.
            logger.opt(depth=6, exception=record.exc_info).log(level, "{}", message)  # the caller of `logging`
        except Exception:  # noqa: BLE001 - a wrong call of a library's, which logging only reports
            self.handleError(record)
