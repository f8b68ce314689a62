"""Several files, one tree: `$BASE` is first flattened to an ordered list of files, then each is laid over the last.

Flattening first matters: if bases were merged recursively, a default shared by two bases would be merged twice, and
its second copy would undo the first base's values.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, shorten
from common.config.schema import child, keys_of, metadata, section_of
from common.config.source import Node, read_file


def flatten(paths: Sequence[Path]) -> list[Node]:
    """Read the files and all their bases, each file once, every base before the files built on it."""
    done: dict[Path, Node] = {}
    for path in paths:
        _visit(path, (), done)
    return list(done.values())


def _visit(path: Path, trail: tuple[Path, ...], done: dict[Path, Node]) -> None:
    if path.resolve() in done:
        return
    body, trail = read_file(path), (*trail, path)
    given = body.value.pop("$BASE", Node([], DEFAULT))
    for base in given.value if isinstance(given.value, list) else [given]:
        target = path.parent / os.path.expanduser(str(base.value))
        if base.problem or base.refers or not isinstance(base.value, str):
            rule, hint = base.problem or "must be a path or a list of paths, without references", ""
        elif reason := not_a_file(target):
            rule, hint = f"this file {reason}", f"looked for {target}; the path is relative to the file with this $BASE"
        elif target.resolve() in [step.resolve() for step in trail]:
            loop = " -> ".join(os.path.relpath(step, trail[0].parent) for step in (*trail, target))
            rule, hint = "the files are based on each other in a loop", loop
        else:
            _visit(target, trail, done)
            continue
        raise ConfigError(
            [Problem("$BASE", base.value if isinstance(base.value, str) else ABSENT, rule, hint, base.origin)]
        )
    done[path.resolve()] = body


def not_a_file(path: Path) -> str:
    """Why `path` cannot be read; "" for a file. Uses `os.path`, since methods of `Path` raise on some odd names."""
    if os.path.isfile(path):
        return ""
    return "is a folder, not a file" if os.path.isdir(path) else "does not exist"


def merge(base: Node, over: Node, annotation: Any, fill: bool = False) -> Node:
    """Lay `over` on `base`: mappings are merged, anything else is replaced.

    A new `type` drops the other keys of a free section, which were the old type's arguments. A section with a schema
    keeps its values, since each key means the same under every type. Also kept are keys that are not arguments: those
    in `ignore` of a check on the field (such as a registry's).

    `fill`: a free section missing from `base` starts from the schema's default. So `--model.width 3` changes the
    default model, and does not define a model without a type.
    """
    if isinstance(over.value, dict) and base.refers and not over.replace:
        rule = f"changes a part of {base.value} ({base.origin}); change the section it refers to, or write all of it"
        return replace(over, problem=over.problem or rule)
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)) or over.replace:
        return over
    entries = dict(base.value)
    old, new = entries.get("type"), over.value.get("type")
    if old is not None and new is not None and old.value != new.value and section_of(annotation) is None:
        kept = {name for item in metadata(annotation) for name in getattr(item, "ignore", ())}
        entries = {name: node for name, node in entries.items() if name in kept}
    for name, node in over.value.items():
        below = entries.get(name)
        if below is None and fill:
            below = _default_node(annotation, name)
        entries[name] = node if below is None else merge(below, node, child(annotation, name), fill)
    return replace(over, value=entries, problem=over.problem or base.problem)


def _default_node(annotation: Any, name: str) -> Node | None:
    """The node that values under a key start from: an empty section, or the default of a free one."""
    parent = section_of(annotation)
    key = keys_of(parent).get(name) if parent is not None else None
    if key is not None and section_of(key.annotation) is not None:
        return Node({}, DEFAULT)
    return node_of(key.default, DEFAULT) if key is not None and isinstance(key.default, dict) else None


def node_of(value: Any, origin: Origin) -> Node:
    """Plain Python data as nodes, all with the same origin."""
    if isinstance(value, dict):
        return Node({name: node_of(item, origin) for name, item in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([node_of(item, origin) for item in value], origin)
    return Node(value, origin, None if isinstance(value, str) else shorten(value))  # a text field takes 3 as "3"
