"""The log: short lines for the terminal, full ones in a file, each with the place in the code it came from."""

import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loguru import logger as logger  # train.py takes it from here: what is not installed is then said by `common`

from common.base.files import Appender

if TYPE_CHECKING:
    from loguru import Record

_PROJECT = Path(__file__).resolve().parents[2]
_CONSOLE = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> <cyan>{extra[at]: <26}</cyan> {message}"
_FILE = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <7} {extra[at]: <26} {message}"
# What was logged before there was a run folder; it belongs in the run's file too. None once a file is open.
_early: deque[str] | None = None


def setup_log(
    level: str = "INFO",
    levels: Mapping[str, str] | None = None,
    *,
    rank: int = 0,
    file: Path | None = None,
    banner: str = "started again",
) -> None:
    """Send every record of loguru, of `logging` and of `warnings` to the terminal and to `file`.

    Call it first thing, for the terminal alone, and again when the run folder is there: what came in between is put
    into the file. The file is appended to; when it holds something, a line with `banner` divides old from new.
    Ranks above 0 send only errors to the terminal; give each a file of its own.

    Args:
        level: the lowest level shown, one of loguru's names.
        levels: other levels for some modules and what lies below them, as in `{"common.trainer": "DEBUG"}`.
    """
    wanted = {"": level, **(levels or {})}
    lowest = min(wanted.values(), key=lambda name: logger.level(name).no)
    logger.remove()
    logger.configure(patcher=_add_place)
    # diagnose would print the values of variables into tracebacks: data, and passwords. The filter makes the choice by
    # module; the level lets loguru refuse early what no module wants.
    options: dict[str, Any] = {"filter": wanted, "diagnose": False, "backtrace": False}
    logger.add(
        _to_console,
        level=lowest if rank == 0 else "ERROR",
        format=_CONSOLE if rank == 0 else _CONSOLE.replace("{message}", f"rank {rank}: {{message}}"),
        colorize=_coloured(sys.stderr),
        **options,
    )
    _open_file(file, lowest, banner, options)
    _route_standard_logging(wanted)
    warnings.showwarning = _log_warning


def _open_file(file: Path | None, level: str, banner: str, options: dict[str, Any]) -> None:
    global _early
    if file is None:
        early: deque[str] = deque(maxlen=1000)
        _early = early
        logger.add(lambda message: early.append(str(message)), level=level, format=_FILE, **options)
        return
    add_to_log(file, "", banner)
    _early = None
    logger.add(Appender(file).write, level=level, format=_FILE, **options)


def add_to_log(file: Path, text: str, banner: str) -> None:
    """Append `text` to a log that is not open, after what was logged before there was a run folder."""
    text = "".join(_early or ()) + text
    if file.exists() and file.stat().st_size > 0:
        text = f"\n{f' {banner} ':=^100}\n{text}"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(text)


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ


def _to_console(message: str) -> None:
    """Write above the progress bar, if there is one; there is none before tqdm is imported."""
    module = sys.modules.get("tqdm")
    if module is None or not getattr(module.tqdm, "_instances", None):
        sys.stderr.write(message)
    else:
        module.tqdm.write(message, file=sys.stderr, end="")


def _add_place(record: "Record") -> None:
    record["extra"].setdefault("at", f"{_short(record['file'].path)}:{record['line']}")


@lru_cache(maxsize=1024)
def _short(path: str) -> str:
    """A source file's path from the project's root; for the libraries', from site-packages."""
    full = Path(path)
    if full.is_relative_to(_PROJECT):
        short = full.relative_to(_PROJECT)
        if short.parts[0] not in (".venv", "venv"):
            return short.as_posix()
    _, mark, after = path.replace("\\", "/").rpartition("/site-packages/")
    return after if mark else path


class _ToLoguru(logging.Handler):
    """Hands records of the standard library's `logging` on; it knows the true caller and respects `stacklevel`."""

    def emit(self, record: logging.LogRecord) -> None:
        def place(own: "Record") -> None:
            own["extra"]["at"] = f"{_short(record.pathname)}:{record.lineno}"
            own["name"], own["function"], own["line"] = record.name, record.funcName, record.lineno

        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:  # a level of the library's own
            level = record.levelno
        # Braces in the text must not be taken for fields, so it goes in as an argument.
        logger.opt(exception=record.exc_info).patch(place).log(level, "{}", record.getMessage())


def _route_standard_logging(wanted: Mapping[str, str]) -> None:
    logging.basicConfig(handlers=[_ToLoguru()], force=True)
    for name, level in wanted.items():
        # At DEBUG libraries log a great deal (Pillow: a line for each block of a PNG), so they need to be named for it.
        number = logger.level(level).no
        logging.getLogger(name).setLevel(max(number, logging.INFO) if name == "" else number)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    def place(record: "Record") -> None:
        record["extra"]["at"] = f"{_short(filename)}:{lineno}"

    logger.patch(place).warning("{}: {}", category.__name__, message)
