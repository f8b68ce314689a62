"""Check a section's keys against the signature of the class or function it configures, without calling it."""

import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from common.base.files import PROJECT
from common.config.problem import ABSENT, Problem, rule_of, suggestion
from common.config.schema import admits, members, run_checks
from common.config.source import list_items, scalar

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_arguments(
    target: Callable[..., Any],
    given: Mapping[str, Any],
    key: str,
    label: Callable[[], str],
    provided: tuple[str, ...] = (),
    others: Collection[str] = (),
    *,
    strict: bool = True,
) -> Iterator[Problem]:
    """Problems that a call `target(**given, **provided)` would have, by its signature and annotations.

    `label` names the target in messages; it is called only for a message, since finding a line is slow.
    `others`: further valid keys of the section, for suggestions. `strict`: a value of another type than the annotation
    is refused; annotations of other packages are often narrower than what they take.
    """
    named, takes_any = parameters(target)
    for name, value in given.items():
        if name in provided:
            rule = f"is set for {label()} by the engine or another key"
            yield Problem(f"{key}.{name}", value, rule, "remove this key")
        elif name in named:
            yield from _check_one(named[name], value, f"{key}.{name}", label, strict)
        elif not takes_any:
            valid = [word for word in named if word not in provided]
            hint = suggestion(name, [*valid, *others], "valid arguments")
            yield Problem(f"{key}.{name}", value, f"is not an argument of {label()}", hint, is_unknown=True)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and name not in provided:
            yield Problem(f"{key}.{name}", ABSENT, f"is required by {label()}")
    for name in provided:
        if name not in named and not takes_any:
            rule = f"{label()} must accept the argument {name}, which the engine passes"
            yield Problem(key, ABSENT, rule, f"add {name} to its parameters")


def fit_arguments(target: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, converted to the annotated types: a path for `Path`, a tuple for `tuple[int, int]`, a section for a
    section class. Raises `ValidationError` if one does not fit, which `check_arguments` reports; a value for a target
    outside the project stays as it is then."""
    named, _ = parameters(target)
    fitted = dict(given)
    for name in given.keys() & named.keys():
        try:
            fitted[name] = _fit(named[name], given[name])
        except ValidationError:
            if not is_foreign(target):
                raise
    return fitted


def is_foreign(target: Callable[..., Any]) -> bool:
    """Return whether `target` is defined outside the project: in an installed package, or in none."""
    module = sys.modules.get(str(getattr(target, "__module__", None)))
    file = getattr(module, "__file__", None) or "/"
    return "site-packages" in file or not Path(file).resolve().is_relative_to(PROJECT)


def parameter_names(target: Callable[..., Any]) -> tuple[str, ...]:
    """Return names of the parameters that can be given by name, in order; () if Python cannot inspect `target`."""
    return tuple(parameters(target)[0])


def parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Parameters that can be given by name, and whether any other name is accepted too."""
    for eval_str in (True, False):  # annotations that only a type checker can resolve stay text
        with suppress(Exception):
            signature = inspect.signature(target, eval_str=eval_str).parameters
            named = {name: parameter for name, parameter in signature.items() if parameter.kind in _NAMED}
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
            return named, takes_any
    return {}, True  # written in C: no signature


def _check_one(
    parameter: inspect.Parameter, value: Any, key: str, label: Callable[[], str], strict: bool
) -> Iterator[Problem]:
    kinds = [getattr(member, "__name__", "") for member in members(parameter.annotation)]
    if isinstance(value, str) and "dtype" in kinds and "str" not in kinds and not _dtype(value):
        yield Problem(key, value, f"must be a dtype such as torch.float32: an argument of {label()}")
    if not strict:
        return
    try:
        _fit(parameter, value)
    except ValidationError as error:
        rule = rule_of(error.errors(include_url=False))
        hint = ""
        if isinstance(value, (bool, int, float)) and admits(parameter.annotation, str):
            hint = "put it in quotes"
        yield Problem(key, value, f"{rule}: an argument of {label()}", hint)
        return
    if value is not None:
        yield from run_checks(parameter.annotation, value, key)


def _fit(parameter: inspect.Parameter, value: Any) -> Any:
    """Convert `value`, read from YAML, to the parameter's type. Raises `ValidationError`.

    Types that pydantic cannot inspect (a module, a tensor) accept anything.
    """
    annotation = parameter.annotation
    if value is None and parameter.default is None:  # `width: int = None` is common
        return value
    if isinstance(value, str) and value.startswith("torch.") and not admits(annotation, str):
        return _dtype(value) or value
    if isinstance(value, str):
        wanted = annotation
        if isinstance(parameter.default, (list, tuple)):
            wanted = list
        items = list_items(value, wanted)
        if items:
            value = [scalar(item) for item in items]
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return value
    try:
        fitted = TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, NameError, TypeError, AttributeError):  # such as a name in quotes inside of a type
        return value
    if isinstance(fitted, Iterator):  # for Iterable, pydantic gives a one-pass iterator
        return value
    return fitted


def _dtype(text: str) -> Any:
    """Return the dtype that a string like "torch.float32" names; None if it names none."""
    import torch  # only here: programs that show runs read configs without it

    dtype = getattr(torch, text.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    return None
