"""User errors, as opposed to bugs."""


class UserError(ValueError):
    """A mistake the user can fix: printed as is, without a traceback.

    The message names the value, the rule it broke, and what to do. Not a `KeyError`: that type prints its text quoted.
    """


def absent_part(what: str, part: str) -> str:
    """Return why something cannot be used in a project without an optional part, and how to get the part."""
    return f"{what} needs the part {part}: make add PART={part}"
