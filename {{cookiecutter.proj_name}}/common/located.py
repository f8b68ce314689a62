"""Errors that say where in the work they happened, besides where in the code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def located(describe: Callable[[], str]) -> Iterator[None]:
    """Put a note on an error that leaves this block: the place, as `describe()` gives it. Costs nothing otherwise."""
    try:
        yield
    except Exception as error:
        # What `add_note` does from Python 3.11 on, whose tracebacks show the notes.
        vars(error).setdefault("__notes__", []).append(describe())
        raise


def with_notes(error: BaseException) -> str:
    """The error's message and its notes, a line each."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", [])])
