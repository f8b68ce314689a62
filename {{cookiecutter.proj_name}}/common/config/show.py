"""A configuration as YAML text: to save, or to read with the origin of each value."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from common.config.problem import DEFAULT, Origin
from common.config.source import scalar


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either this project's reader or a YAML 1.1 reader would read as another value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    safe = scalar(text) == text and text.isprintable() and text != "<<"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if safe else '"')


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, (dict, list)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat or None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def dump(values: Any, flow: bool = False) -> str:
    """YAML text that loads back to equal values. `flow`: on one line."""
    return _write(_escaped(values), flow)


def _write(values: Any, flow: bool) -> str:
    text: str = yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=flow
    )
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def _escaped(values: Any) -> Any:
    """`values` with each dollar doubled, since `${key}` would be read as a reference; not in keys."""
    if isinstance(values, dict):
        return {name: _escaped(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_escaped(value) for value in values]
    return values.replace("$", "$$") if isinstance(values, str) else values


def with_origins(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> str:
    """YAML text with the origin of each value as a comment; loads back like `dump`."""
    lines = [(line, "" if is_section else str(origins.get(key, DEFAULT))) for key, line, is_section in rows(values)]
    width = min(max((len(line) for line, origin in lines if origin), default=0), 60)
    shown = [f"{line:<{width}}  # {' '.join(origin.splitlines())}" if origin else line for line, origin in lines]
    return "".join(f"{line}\n" for line in shown)


def rows(values: Mapping[str, Any], above: str = "", indent: str = "") -> Iterator[tuple[str, str, bool]]:
    """The lines of YAML text: each with its dotted key, and whether the value follows in the next lines."""
    for name, value in values.items():
        key, label = f"{above}.{name}".removeprefix("."), indent + _write(name, flow=True)
        is_section = isinstance(value, dict) and bool(value)
        yield key, f"{label}:" if is_section else f"{label}: {dump(value, flow=True)}", is_section
        if is_section:
            yield from rows(value, key, f"{indent}  ")
