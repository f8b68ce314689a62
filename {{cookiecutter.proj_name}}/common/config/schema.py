"""Look up keys in a schema: their types and defaults, and suggestions for unknown keys."""

import dataclasses
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic_core import to_jsonable_python
from typing_extensions import dataclass_transform  # in `typing` from Python 3.11 on

from common.config.problem import ABSENT, RESERVED, Problem, join, nearest

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """Make a class a section of the configuration: a frozen dataclass that refuses unknown keys and wrong types.

    Rules about several keys go in a method `problems(self) -> Iterator[Problem]`; its keys are relative to the
    section. It runs last: values that are wrong by themselves have been replaced by their defaults.
    """
    cls.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class EditorRule(ABC):
    """Base of the markers, for `Annotated`, of fields whose values are restricted by more than their type."""

    @abstractmethod
    def editor_rule(self) -> dict[str, Any]:
        """That restriction as a JSON schema; it may contain what `Registry.editor_rule` returns."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {**handler(core), "allOf": [self.editor_rule()]}


class Key(NamedTuple):
    """One field of a section. `default` is plain data; ABSENT if the field is required."""

    annotation: Any
    default: Any


@cache
def keys_of(schema: type) -> dict[str, Key]:
    """Return the fields of a section, in the order they were written."""
    hints = typing.get_type_hints(schema, include_extras=True)
    missing = dataclasses.MISSING
    keys = {}
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is missing else field.default_factory()
        keys[field.name] = Key(hints[field.name], ABSENT if default is missing else to_jsonable_python(default))
    return keys


def bare(annotation: Any) -> Any:
    """Return the type below `Annotated` and type aliases."""
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    return bare(annotation.__value__) if hasattr(annotation, "__value__") else annotation


def metadata(annotation: Any) -> tuple[Any, ...]:
    """Return the metadata that `Annotated` attaches to a type."""
    return getattr(annotation, "__metadata__", ())


def members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or the type itself, each `bare`."""
    plain = bare(annotation)
    if get_origin(plain) in (Union, types.UnionType):
        return [inner for member in get_args(plain) for inner in members(member)]
    return [plain]


def section_of(annotation: Any) -> type | None:
    """Return the section class among the alternatives of a type, if there is exactly one."""
    sections: list[Any] = [member for member in members(annotation) if dataclasses.is_dataclass(member)]
    return sections[0] if len(sections) == 1 else None


def child(annotation: Any, part: str | int) -> Any:
    """Return the type of the item at key or index `part` of a value of this type; Any if the schema does not say."""
    section = section_of(annotation)
    if section is not None and part in keys_of(section):
        return keys_of(section)[str(part)].annotation
    for member in members(annotation):
        arguments = get_args(member)
        if isinstance(part, int) and is_list(member):
            return arguments[0] if arguments else Any
        if isinstance(part, str) and _is(get_origin(member) or member, Mapping):
            return arguments[1] if arguments else Any
    return Any


def run_checks(annotation: Any, value: Any, key: str) -> Iterator[Problem]:
    """Problems of a plain value, by the rules attached to a type, and to the item type of its list or mapping.

    Such a rule is about one field, and its type cannot express it: `Annotated[dict[str, Any], MyRule()]`, with a method
    `check(value, key)` that yields problems and builds nothing.
    """
    for item in metadata(annotation):
        if hasattr(item, "check"):
            yield from item.check(value, key)
    for part, inner in items_of(value):
        yield from run_checks(child(annotation, part), inner, join(key, part))


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys or indices of a mapping or a list, with their values; none of any other value."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def is_list(member: Any) -> bool:
    """Return whether a YAML list fits this type (text, also a sequence in Python, does not count)."""
    kind = get_origin(member) or member
    return _is(kind, Collection) and not _is(kind, (Mapping, str, bytes))


def admits(annotation: Any, *wanted: Any) -> bool:
    """Return whether one alternative of this type is one of `wanted`; `list` means any type that a YAML list fits."""
    return any(member in wanted or (list in wanted and is_list(member)) for member in members(annotation))


def only_text(annotation: Any) -> bool:
    """Return whether only text (or null) fits: then `007` and `true` stay text, as typed."""
    kinds = [member for member in members(annotation) if member is not type(None)]
    words = [kind for kind in kinds if get_origin(kind) is Literal and all(isinstance(x, str) for x in get_args(kind))]
    return bool(kinds) and all(_is(kind, (str, Path)) or kind in words for kind in kinds)


def _is(kind: Any, parents: type | tuple[type, ...]) -> bool:
    return isinstance(kind, type) and issubclass(kind, parents)


def walk(schema: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every key of a schema with its dotted name, sections before their keys."""
    for name, key in keys_of(schema).items():
        yield prefix + name, key
        below = section_of(key.annotation)
        if below:
            yield from walk(below, f"{prefix}{name}.")


def suggest(root: type, parent: type, prefix: str, name: str) -> str:
    """Return a hint for the unknown key `prefix + name` of section `parent`, or "".

    An old name first (`__renamed__`), then the same name elsewhere, a close one here, a close one elsewhere.
    """
    renamed: str | None = getattr(parent, "__renamed__", {}).get(name)
    if renamed is not None:
        if " " in renamed:
            return renamed
        return f"it is called {prefix if renamed in keys_of(parent) else ''}{renamed}"
    known = {option.removeprefix("--"): [option] for option in RESERVED}
    for dotted, _ in walk(root):
        known.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    here = {key: [prefix + key] for key in keys_of(parent)}
    for among, cutoff in ((known, 1.0), (here, 0.6), (known, 0.75)):
        near = nearest(name, among, cutoff)
        if near:
            return f"did you mean {' or '.join(among[near][:3])}?"
    return ""
