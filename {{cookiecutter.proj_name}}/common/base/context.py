"""Note on an error where it happened, without changing its traceback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def error_context(describe: Callable[[], str]) -> Iterator[None]:
    """Append `describe()` to the notes of an exception raised in the block. It is called only then."""
    try:
        yield
    except Exception as error:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", []), describe()]  # as `add_note` of Python 3.11
        raise


def with_notes(error: BaseException) -> str:
    """Return the error's message and its notes, one per line."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", [])])
