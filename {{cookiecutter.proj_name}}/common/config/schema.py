"""Look up keys in a schema: their types and defaults, and suggestions for unknown keys."""

import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import to_jsonable_python
from typing_extensions import dataclass_transform  # in `typing` from Python 3.11 on

from common.base.parts import sections
from common.config.problem import ABSENT, RESERVED, Problem, did_you_mean, join

T = TypeVar("T")

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """Make a class a section of the configuration: a frozen dataclass that refuses unknown keys and wrong types.

    Rules about several keys go in a method `problems(self) -> Iterator[Problem]`; its keys are relative to the
    section. It runs last: values that are wrong by themselves have been replaced by their defaults.
    """
    cls.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def extensible_section(cls: type[T]) -> type[T]:
    """Make a class a section to which parts may add keys. To the type checker, it has only its own."""
    return section(sections(section(cls)))


class Key(NamedTuple):
    """One field of a section. `default` is plain data; ABSENT if the field is required."""

    section: type
    annotation: Any
    default: Any
    adapter: TypeAdapter[Any]


@cache
def keys_of(schema: type) -> dict[str, Key]:
    """Return the fields of a section, in the order they were written."""
    hints = typing.get_type_hints(schema, include_extras=True)
    missing = dataclasses.MISSING
    keys = {}
    for field in dataclasses.fields(schema):
        default: Any = ABSENT
        if field.default is not missing:
            default = to_jsonable_python(field.default)
        elif field.default_factory is not missing:
            default = to_jsonable_python(field.default_factory())
        annotation = hints[field.name]
        keys[field.name] = Key(schema, annotation, default, adapter_of(annotation))
    return keys


def adapter_of(annotation: Any) -> TypeAdapter[Any]:
    """Return what makes a value of this type, strictly."""
    if dataclasses.is_dataclass(bare(annotation)):
        return TypeAdapter(annotation)  # it has settings of its own
    return TypeAdapter(annotation, config=_STRICT)


def bare(annotation: Any) -> Any:
    """Return the type below `Annotated`."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def metadata(annotation: Any) -> tuple[Any, ...]:
    """Return the metadata that `Annotated` attaches to a type."""
    return getattr(annotation, "__metadata__", ())


def members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or the type itself, each `bare`."""
    plain = bare(annotation)
    if get_origin(plain) not in (Union, types.UnionType):
        return [plain]
    found = []
    for member in get_args(plain):
        found += members(member)
    return found


def section_of(annotation: Any) -> type | None:
    """Return the section class among the alternatives of a type; None if there is none."""
    found = None
    for member in members(annotation):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            if found is not None:
                raise TypeError(f"{annotation} names several sections, but a field can hold one kind of section only")
            found = member
    return found


def child(annotation: Any, part: str | int) -> Any:
    """Return the type of the item at key or index `part` of a value of this type; Any if the schema does not say."""
    section = section_of(annotation)
    if section is not None and part in keys_of(section):
        return keys_of(section)[str(part)].annotation
    for member in members(annotation):
        arguments = get_args(member)
        if arguments and isinstance(part, int) and is_list(member):
            return arguments[0]
        if arguments and isinstance(part, str) and _is(get_origin(member), Mapping):
            return arguments[1]
    return Any


def run_checks(annotation: Any, value: Any, key: str) -> Iterator[Problem]:
    """Problems of a plain value, by the rules attached to a type, and to the item type of its list or mapping.

    Such a rule is about one field, and its type cannot express it: `Annotated[dict[str, Any], MyRule()]`, with a method
    `check(value, key)` that yields problems and builds nothing.
    """
    yield from own_checks(annotation, value, key)
    for part, inner in items_of(value):
        yield from run_checks(child(annotation, part), inner, join(key, part))


def own_checks(annotation: Any, value: Any, key: str) -> Iterator[Problem]:
    """As `run_checks`, without the items."""
    for item in metadata(annotation):
        if hasattr(item, "check"):
            yield from item.check(value, key)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys or indices of a mapping or a list, with their values; none of any other value."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return list(enumerate(value))
    return []


def is_list(member: Any) -> bool:
    """Return whether a YAML list fits this type (text, also a sequence in Python, does not count)."""
    kind = get_origin(member) or member
    return _is(kind, Collection) and not _is(kind, (Mapping, str, bytes))


def admits(annotation: Any, *wanted: Any) -> bool:
    """Return whether one alternative of this type is one of `wanted`; `list` means any type that a YAML list fits."""
    kinds = members(annotation)
    if list in wanted and any(map(is_list, kinds)):
        return True
    return any(kind in wanted for kind in kinds)


def only_text(annotation: Any) -> bool:
    """Return whether only text (or null) fits: then `007` and `true` stay text, as typed."""
    kinds = [kind for kind in members(annotation) if kind is not type(None)]
    for kind in kinds:
        choices = [kind]
        if get_origin(kind) is Literal:
            choices = [type(each) for each in get_args(kind) if each is not None]
        if not all(_is(each, (str, Path)) for each in choices):
            return False
    return bool(kinds)


def _is(kind: Any, parents: type | tuple[type, ...]) -> bool:
    return isinstance(kind, type) and issubclass(kind, parents)


def walk(schema: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every key of a schema with its dotted name, sections before their keys."""
    for name, key in keys_of(schema).items():
        yield prefix + name, key
        below = section_of(key.annotation)
        if below:
            yield from walk(below, f"{prefix}{name}.")


def suggest(root: type, parent: type, above: str, name: str) -> str:
    """Return a hint for an unknown key of section `parent`, which is at `above`: a close one there, or elsewhere."""
    here = {key: join(above, key) for key in keys_of(parent)}
    elsewhere = {option.removeprefix("--"): option for option in RESERVED}
    for dotted, _ in walk(root):
        elsewhere.setdefault(dotted.rpartition(".")[2], dotted)
    return did_you_mean(name, here) or did_you_mean(name, elsewhere, 0.75)
