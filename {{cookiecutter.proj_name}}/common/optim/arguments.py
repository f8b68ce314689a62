"""Torch's classes named in a configuration, and whether the arguments written beside them fit their signature."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from common.base.errors import UserError
from common.config import ABSENT, arguments, suggestion
from common.config.registry import import_path


def choices(name: str, names: Iterable[str]) -> str:
    """A sentence with the one of `names` that `name` was meant to be, or with all of them when none is near."""
    text = suggestion(name, sorted(names))
    return text if text.endswith("?") else f"{text}."


def import_class(key: str, path: str, base: type) -> type:
    """The class at "package.module.Class" or "package.module:Class", as `key` has it.

    Raises `UserError` when it cannot be imported or is no `base`.
    """
    try:
        found = import_path(path)
    except UserError as error:
        raise UserError(f"{key} {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{key} {path!r} is not a {base.__name__}; name a class derived from {base.__module__}.{base.__name__}"
        )
    return found


def accepts(cls: type, name: str) -> bool:
    """Whether the constructor names the argument `name`. Those it would only collect in **kwargs do not count."""
    return name in arguments.parameter_names(cls)


def check_arguments(cls: type, given: Mapping[str, Any], provided: Collection[str], owner: str) -> None:
    """Raise `UserError` unless `cls(**provided, **given)` fits the signature; `owner` is the key that names the class.

    `given` was written as `args`. `provided` holds the arguments that come from elsewhere and are refused here.
    """
    supplied = tuple(name for name in provided if accepts(cls, name))
    for problem in arguments.check_arguments(cls, given, "args", lambda: f"{owner} {cls.__name__}", supplied):
        key = problem.key.replace(".", ": ") if problem.value is ABSENT else problem.key
        raise UserError("; ".join(filter(None, (f"{key} {problem.rule}", problem.hint))))


def as_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with every YAML list as a tuple, which is how torch's classes store and compare their pairs."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
