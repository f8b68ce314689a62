"""Patterns over the full dotted names of parameters and modules: * is any text, dots too."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from common.base.errors import UserError
from common.config.schema import nearest


def match_names(patterns: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """Return the names that any of `patterns` matches, in their order.

    Args:
        key: config key, for the message.

    Raises:
        UserError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern, names)
            hint = f"did you mean {near}?" if near else "available: " + join_names(names)
            raise UserError(f"{key}: {pattern} matches none of the model's {len(names)} names; {hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def parents(names: Iterable[str]) -> list[str]:
    """Return the modules that hold `names`, outer before inner: `a` and `a.b` of `a.b.weight`."""
    return list(dict.fromkeys(above for name in names for above in accumulate(name.split(".")[:-1], "{}.{}".format)))


def join_names(names: Sequence[str], limit: int = 8) -> str:
    """Return the first names, and how many more there are."""
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])
