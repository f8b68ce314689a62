"""Check a section's keys against the signature of the class or function it configures, without calling it."""

import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from common.base.files import PROJECT
from common.config.problem import ABSENT, Problem, problems_of, suggestion
from common.config.schema import admits, child, only_text, run_checks
from common.config.source import scalar

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_arguments(
    target: Callable[..., Any],
    given: Mapping[str, Any],
    key: str,
    label: str,
    provided: tuple[str, ...],
    others: Collection[str] = (),
) -> Iterator[Problem]:
    """Problems that a call `target(**given, **provided)` would have, by its signature and annotations.

    `label` names the target in messages. `others`: further valid keys of the section, for suggestions.
    """
    named, takes_any = parameters(target)
    for name, value in given.items():
        if name in provided:
            rule = f"is set for {label} by the engine or another key"
            yield Problem(f"{key}.{name}", value, rule, "remove this key")
        elif name in named:
            if not is_foreign(target):
                yield from _check_one(named[name], value, f"{key}.{name}", label)
        elif not takes_any:
            valid = [word for word in named if word not in provided]
            hint = suggestion(name, [*valid, *others], "valid arguments")
            yield Problem(f"{key}.{name}", value, f"is not an argument of {label}", hint, is_unknown=True)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and name not in provided:
            yield Problem(f"{key}.{name}", ABSENT, f"is required by {label}")


def fit_arguments(target: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, converted to the annotated types: a path for `Path`, a tuple for `tuple[int, int]`, a section for a
    section class. What does not fit stays as it is; `check_arguments` reports it."""
    named, _ = parameters(target)
    fitted = dict(given)
    for name in given.keys() & named.keys():
        with suppress(ValueError):
            fitted[name] = _fit(named[name], given[name])
    return fitted


def is_foreign(target: Callable[..., Any]) -> bool:
    """Return whether `target` is defined outside the project, where annotations are often narrower than what is taken;
    those of torch.optim are right."""
    name = str(getattr(target, "__module__", None))
    file = getattr(sys.modules.get(name), "__file__", None) or "/"
    is_own = "site-packages" not in file and Path(file).resolve().is_relative_to(PROJECT)
    return not is_own and not name.startswith("torch.optim")


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


def as_list(value: Any, annotation: Any) -> Any:
    """Text like `0,1,2` as a list, where a list is expected and no text; any other value unchanged."""
    if not isinstance(value, str) or "," not in value or not admits(annotation, list) or admits(annotation, str, Any):
        return value
    items: list[Any] = [item.strip() for item in value.removesuffix(",").split(",")]
    if only_text(child(annotation, 0)):
        return items
    return [scalar(item) for item in items]


def _check_one(parameter: inspect.Parameter, value: Any, key: str, label: str) -> Iterator[Problem]:
    try:
        _fit(parameter, value)
    except ValidationError as error:
        for problem in problems_of(key, value, error):
            yield replace(problem, rule=f"{problem.rule}: an argument of {label}")
    else:
        if value is not None:
            yield from run_checks(parameter.annotation, value, key)


def _fit(parameter: inspect.Parameter, value: Any) -> Any:
    """Convert `value`, read from YAML, to the parameter's type. Raises `ValueError`.

    Types that pydantic cannot inspect (a module, a tensor) accept anything.
    """
    annotation = parameter.annotation
    if value is None and parameter.default is None:  # `width: int = None` is common
        return value
    wanted = annotation
    if isinstance(parameter.default, (list, tuple)):
        wanted = list
    value = as_list(value, wanted)
    if annotation is parameter.empty or isinstance(annotation, str):
        return value
    try:
        fitted = TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, NameError, TypeError, AttributeError):  # such as a name in quotes inside of a type
        return value
    if isinstance(fitted, Iterator):  # for Iterable, pydantic gives a one-pass iterator
        return value
    return fitted
