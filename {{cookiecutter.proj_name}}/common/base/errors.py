"""User errors, as opposed to bugs; and notes on where an error happened."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake the user can fix: printed as is, without a traceback.

    The message names the value, the rule it broke, and what to do. Not a `KeyError`: that type prints its text quoted.
    """


@contextmanager
def error_context(note: str | Callable[[], str]) -> Iterator[None]:
    """Append `note` to the notes of an exception raised in the block, without changing its traceback.

    A function returns the note, and is called only then.
    """
    try:
        yield
    except Exception as error:
        if callable(note):
            note = note()
        notes = getattr(error, "__notes__", [])
        vars(error)["__notes__"] = [*notes, note]  # as `add_note` of Python 3.11
        raise


def with_notes(error: BaseException) -> str:
    """Return the error's message and its notes, one per line."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", [])])
