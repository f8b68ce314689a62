"""Classes named in a configuration, and whether the arguments written beside them fit their signature."""

import importlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from common.base.errors import UserError
from common.config import nearest


def choices(name: str, names: Iterable[str]) -> str:
    """The one of `names` that `name` was meant to be, or all of them when none is near."""
    names = sorted(names)
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"there are {', '.join(names)}."


def import_class(key: str, path: str, base: type) -> type:
    """The class at "package.module.Class" or "package.module:Class", as `key` has it.

    Raises `UserError` when it cannot be imported or is no `base`.
    """
    module_name, _, class_name = path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{key} {path!r}: {module_name} cannot be imported ({error}); correct its path") from error
    found = getattr(module, class_name, None)
    if found is None:
        names = (name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base))
        raise UserError(f"{key} {path!r}: {module_name} has no {class_name}; {choices(class_name, names)}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{key} {path!r} is no {base.__name__}; name a class derived from {base.__module__}.{base.__name__}"
        )
    return found


def accepts(cls: type, name: str) -> bool:
    """Whether the constructor names the argument `name`. Those it would only collect in **kwargs do not count."""
    return name in inspect.signature(cls).parameters


def check_arguments(cls: type, given: Mapping[str, Any], provided: Collection[str], owner: str) -> None:
    """Raise `UserError` unless `cls(**provided, **given)` fits the signature; `owner` is the key that names the class.

    `given` was written as `args`. `provided` holds the arguments that come from elsewhere and are refused here. Values
    are the class's own affair.
    """
    parameters = dict(inspect.signature(cls).parameters)
    named = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    free = [k for k in named if k not in provided]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in given:
        if name in provided:
            raise UserError(f"args.{name}: it is set by its own key; remove it here")
        if name not in named and not open_ended:
            raise UserError(f"args.{name}: {owner} {cls.__name__} takes no {name!r}; {choices(name, free)}")
    for name in free:
        if named[name].default is inspect.Parameter.empty and name not in given:
            raise UserError(f"args: {owner} {cls.__name__} needs {name}; add args.{name}")


def as_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with every YAML list as a tuple, which is how torch's classes store and compare their pairs."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
