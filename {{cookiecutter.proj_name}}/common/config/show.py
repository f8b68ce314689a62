"""A configuration as YAML text."""

import math
from typing import Any

import yaml

from common.config.source import scalar


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either this project's reader or a YAML 1.1 reader would read as another value."""


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
    text: str = yaml.dump(
        _escape(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=flow
    )
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def _escape(values: Any) -> Any:
    """`values` with each dollar doubled, since `${key}` would be read as a reference; not in keys."""
    if isinstance(values, dict):
        return {name: _escape(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_escape(value) for value in values]
    return values.replace("$", "$$") if isinstance(values, str) else values
