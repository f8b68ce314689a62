"""Several files, one tree: `$BASE` is first flattened to an ordered list of files, then each is laid over the last.

Flattening first matters: if bases were merged recursively, a default shared by two bases would be merged twice, and
its second copy would undo the first base's values.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.base.files import PROJECT
from common.config.problem import ABSENT, DEFAULT, ConfigError, Problem, nearest, shorten, shown_path
from common.config.schema import child, keys_of, metadata, only_text, section_of
from common.config.source import Node, list_items, plain, read_file, scalar_node


def flatten(paths: Sequence[Path]) -> dict[Path, Node]:
    """Read the files and all their bases, each file once, every base before the files built on it."""
    done: dict[Path, Node] = {}
    for path in paths:
        _visit(path, (), done)
    return done


def _visit(path: Path, trail: tuple[Path, ...], done: dict[Path, Node]) -> None:
    if path.resolve() in done:
        return
    body = read_file(path)
    given = body.value.pop("$BASE", Node([], DEFAULT))
    bases = given.value
    if not isinstance(bases, list):
        bases = [given]
    for base in bases:
        if base.problem or base.refers or not isinstance(base.value, str):
            rule = base.problem or "must be a path or a list of paths, without references"
            raise ConfigError([Problem("$BASE", plain(base), rule, origin=base.origin)])
        target = find_file("$BASE", base.value, path.parent, base.origin)
        steps = (*trail, path, target)
        if any(target.samefile(step) for step in steps[:-1]):
            loop = " -> ".join(map(shown_path, steps))
            raise ConfigError([Problem("$BASE", base.value, "the files have a circular $BASE", loop, base.origin)])
        _visit(target, steps[:-1], done)
    done[path.resolve()] = body


def find_file(key: str, name: str, folder: Path, origin: str | None = None) -> Path:
    """Find the file `name`, which `key` gives relative to `folder`.

    Raises `ConfigError`, with a similar name if any.
    """
    file = folder / os.path.expanduser(name)
    if os.path.isfile(file):  # `os.path`, since methods of `Path` raise on some odd names
        return file
    rule = "this file does not exist"
    if os.path.isdir(file):
        rule = "this file is a folder"
    hint = f"looked for {os.path.abspath(file)}"
    others: dict[str, Path] = {}
    for root in (PROJECT / "configs", file.parent):
        if os.path.isdir(root):
            others |= {other.name: other for other in root.glob("*.y*ml")}
    near = nearest(file.name, others)
    if near is not None:
        similar = os.path.relpath(others[near], folder)
        if similar.startswith("../.."):  # far away
            similar = str(others[near])
        hint += f"; did you mean {similar}?"
    raise ConfigError([Problem(key, name, rule, hint, origin)])


def merge(base: Node, over: Node, annotation: Any) -> Node:
    """Lay `over` on `base`: mappings are merged, anything else is replaced.

    A new `type` drops the other keys of a free section, which were the old type's arguments. A section with a schema
    keeps its values, since each key means the same under every type. Also kept are keys that are not arguments: those
    in `ignore` of a check on the field (such as a registry's).
    """
    if isinstance(over.value, dict) and base.refers and not over.replace:
        rule = f"changes a part of {base.value} ({base.origin}); change the section it refers to, or write all of it"
        return replace(over, problem=over.problem or rule)
    if not isinstance(over.value, dict):
        return replace(over, replace=False)
    if over.replace or not isinstance(base.value, dict):
        return replace(over, replace=True)  # of what is below `base`, nothing stays
    entries = dict(base.value)
    if section_of(annotation) is None and _changes_type(entries, over.value):
        kept: set[str] = set()
        for item in metadata(annotation):
            kept.update(getattr(item, "ignore", ()))
        entries = {name: node for name, node in entries.items() if name in kept}
    for name, node in over.value.items():
        if name in entries:
            node = merge(entries[name], node, child(annotation, name))
        entries[name] = node
    return replace(over, value=entries, replace=base.replace, problem=over.problem or base.problem)


def _changes_type(old: Mapping[str, Node], new: Mapping[str, Node]) -> bool:
    return "type" in old and "type" in new and old["type"].value != new["type"].value


def complete(node: Node, annotation: Any) -> Node:
    """`node` in the form that suits the type: all keys of a section, text for a text field, a list for `0,1,2`."""
    value = node.value
    if node.problem or node.refers or value is None:
        return node
    if isinstance(value, str):
        items = list_items(value, annotation)
        if items:
            value = [scalar_node(item, False, node.origin) for item in items]
    if isinstance(value, list):
        return replace(node, value=[complete(item, child(annotation, 0)) for item in value])
    if not isinstance(value, dict):
        if node.text is not None and only_text(annotation):
            return replace(node, value=node.text)
        return node
    entries = {}
    schema = section_of(annotation)
    if schema is not None:
        for name, key in keys_of(schema).items():
            if key.default is not ABSENT:
                entries[name] = node_of(key.default, DEFAULT)
    entries |= value
    for name, item in entries.items():
        entries[name] = complete(item, child(annotation, name))
    return replace(node, value=entries)


def node_of(value: Any, origin: str) -> Node:
    """Return plain data as nodes, all with the same origin; nodes get it too."""
    if isinstance(value, Node):
        inner = node_of(value.value, origin)
        return replace(inner, text=value.text, problem=value.problem)
    if isinstance(value, dict):
        return Node({name: node_of(item, origin) for name, item in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([node_of(item, origin) for item in value], origin)
    if isinstance(value, str):
        return Node(value, origin)
    return Node(value, origin, shorten(value))  # a text field takes 3 as "3"
