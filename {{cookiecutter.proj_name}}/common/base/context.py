"""Saying where an error happened, without touching its traceback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def error_context(describe: Callable[[], str]) -> Iterator[None]:
    """Add what `describe` gives to the notes of an exception that passes. It is called only then."""
    try:
        yield
    except Exception as error:
        # What `add_note` of Python 3.11 does.
        notes = getattr(error, "__notes__", None)
        if notes is None:
            notes = error.__notes__ = []
        notes.append(describe())
        raise


def with_notes(error: BaseException) -> str:
    """The error's message and its notes, a line each."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", [])])
