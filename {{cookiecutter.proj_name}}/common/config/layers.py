"""Several files, one tree: `$BASE` is flattened to an ordered list of files first, then each is laid over the last.

Flattening first matters: were each base merged by recursion, a default shared by two bases would be merged twice, and
its second copy would undo what the first base had set.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem
from common.config.shape import child, keys_of, metadata, section_of
from common.config.source import Branch, File, Items, Leaf, Node, read_file


def flatten(paths: Sequence[Path]) -> list[File]:
    """The files and all their bases, each once, every base before the files built on it."""
    done: dict[Path, File] = {}
    for path in paths:
        _visit(path, (), done)
    return list(done.values())


def _visit(path: Path, trail: tuple[Path, ...], done: dict[Path, File]) -> None:
    real = path.resolve()
    if real in done:
        return
    file = read_file(path)
    for base in file.bases:
        target = _base_path(base, path)
        chain = (*trail, path)
        if target.resolve() in [step.resolve() for step in chain]:
            names = [os.path.relpath(step, chain[0].parent) for step in (*chain, target)]
            _refuse(base, "the bases form a loop", " -> ".join(names))
        _visit(target, chain, done)
    done[real] = file


def _base_path(base: Leaf, includer: Path) -> Path:
    target = includer.parent / os.path.expanduser(base.value)
    if problem := not_a_file(target):
        _refuse(base, f"this base {problem}", f"looked for {target}; the path is relative to the file that names it")
    return target


def not_a_file(path: Path) -> str:
    """Why this cannot be read; nothing for a file. `os.path`, since the methods of `Path` raise on some odd names."""
    if os.path.isfile(path):
        return ""
    return "is a folder, not a file" if os.path.isdir(path) else "does not exist"


def _refuse(base: Leaf, rule: str, hint: str) -> None:
    raise ConfigError([Problem("$BASE", base.value, rule, hint, base.origin)])


def merge(base: Node, over: Node, annotation: Any) -> Node:
    """`over` laid on `base`: mappings are merged, anything else is replaced. Neither is changed."""
    if not (isinstance(base, Branch) and isinstance(over, Branch)) or over.replace:
        return over
    entries = dict(_still_meant(base, over, annotation))
    for name, node in over.entries.items():
        entries[name] = merge(entries[name], node, child(annotation, name)) if name in entries else node
    return Branch(entries, over.origin)


def _still_meant(base: Branch, over: Branch, annotation: Any) -> dict[str, Node]:
    """What stays of `base`: nothing of a free section whose `type` changes, since its arguments were the old type's.

    A section with a schema keeps its values (each key means the same under every type), and so do the keys which a
    check on the field (a registry's, say) names in `ignore` as not being arguments.
    """
    old, new = base.entries.get("type"), over.entries.get("type")
    same = not (isinstance(old, Leaf) and isinstance(new, Leaf)) or old.value == new.value
    if same or section_of(annotation) is not None:
        return base.entries
    kept = {name for item in metadata(annotation) for name in getattr(item, "ignore", ())}
    return {name: node for name, node in base.entries.items() if name in kept}


def stack(files: Sequence[File], schema: type) -> Branch:
    """All files as one tree, later ones winning."""
    tree: Node = Branch({}, DEFAULT)
    for file in files:
        tree = merge(tree, file.body, schema)
    assert isinstance(tree, Branch)
    return tree


def show_defaults(tree: Branch, over: Branch, schema: type) -> Branch:
    """`tree` with the schema's default for each free section that `over` changes and `tree` does not mention.

    Without this `--model.width 3` would be a model of width 3 and no type, where the user meant the default model.
    """
    entries = dict(tree.entries)
    for name, node in over.entries.items():
        key = keys_of(schema).get(name)
        if key is None or not isinstance(node, Branch) or node.replace:
            continue
        below, existing = section_of(key.annotation), entries.get(name)
        if below is not None and (existing is None or isinstance(existing, Branch)):
            entries[name] = show_defaults(existing or Branch({}, DEFAULT), node, below)
        elif existing is None and isinstance(key.default, dict):
            entries[name] = node_of(key.default, DEFAULT)
    return Branch(entries, tree.origin)


def node_of(value: Any, origin: Origin) -> Node:
    """Plain Python data as nodes, all of one origin."""
    if isinstance(value, dict):
        return Branch({name: node_of(item, origin) for name, item in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Items([node_of(item, origin) for item in value], origin)
    return Leaf(value, str(value), False, origin)


def data_of(value: Any) -> Any:
    """A finished configuration value as plain data: dicts in the order of the schema, lists, scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: data_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: data_of(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [data_of(item) for item in value]
    if value is None or value is ABSENT or type(value) in (bool, int, float, str):
        return value
    return data_of(value.value) if hasattr(value, "value") else str(value)
