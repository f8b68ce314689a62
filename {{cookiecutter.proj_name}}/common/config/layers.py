"""Several files, one tree: `$BASE` is flattened to an ordered list of files first, then each is laid over the last.

Flattening first matters: were each base merged by recursion, a default shared by two bases would be merged twice, and
its second copy would undo what the first base had set.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config.problem import DEFAULT, ConfigError, Origin, Problem
from common.config.schema import child, keys_of, metadata, section_of
from common.config.source import File, Node, read_file


def flatten(paths: Sequence[Path]) -> list[File]:
    """The files and all their bases, each once, every base before the files built on it."""
    done: dict[Path, File] = {}
    for path in paths:
        _visit(path, (), done)
    return list(done.values())


def _visit(path: Path, trail: tuple[Path, ...], done: dict[Path, File]) -> None:
    if path.resolve() in done:
        return
    file, trail = read_file(path), (*trail, path)
    for base in file.bases:
        target = path.parent / os.path.expanduser(base.value)
        if problem := not_a_file(target):
            rule, hint = f"this base {problem}", f"looked for {target}; the path is relative to the file that names it"
            raise ConfigError([Problem("$BASE", base.value, rule, hint, base.origin)])
        if target.resolve() in [step.resolve() for step in trail]:
            loop = " -> ".join(os.path.relpath(step, trail[0].parent) for step in (*trail, target))
            raise ConfigError([Problem("$BASE", base.value, "the bases form a loop", loop, base.origin)])
        _visit(target, trail, done)
    done[path.resolve()] = file


def not_a_file(path: Path) -> str:
    """Why this cannot be read; nothing for a file. `os.path`, since the methods of `Path` raise on some odd names."""
    if os.path.isfile(path):
        return ""
    return "is a folder, not a file" if os.path.isdir(path) else "does not exist"


def merge(base: Node, over: Node, annotation: Any) -> Node:
    """`over` laid on `base`: mappings are merged, anything else is replaced.

    A new `type` drops the other keys of a free section, which were the old type's arguments. A section with a schema
    keeps its values (each key means the same under every type), and so do the keys that a check on the field (a
    registry's, say) names in `ignore` as not being arguments.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)) or over.replace:
        return over
    entries = dict(base.value)
    old, new = entries.get("type"), over.value.get("type")
    if old is not None and new is not None and old.value != new.value and section_of(annotation) is None:
        kept = {name for item in metadata(annotation) for name in getattr(item, "ignore", ())}
        entries = {name: node for name, node in entries.items() if name in kept}
    for name, node in over.value.items():
        entries[name] = merge(entries[name], node, child(annotation, name)) if name in entries else node
    return Node(entries, over.origin)


def stack(files: Sequence[File], schema: type) -> Node:
    """All files as one tree, later ones winning."""
    tree = Node({}, DEFAULT)
    for file in files:
        tree = merge(tree, file.body, schema)
    return tree


def lay(tree: Node, over: Node, schema: type) -> Node:
    """`over` laid on `tree`, or on the schema's default of each free section that `tree` does not mention.

    So `--model.width 3` changes the default model, and is not a model of width 3 and no type.
    """
    return merge(_with_defaults(tree, over, schema), over, schema)


def _with_defaults(tree: Node, over: Node, schema: type) -> Node:
    entries = dict(tree.value)
    for name, node in over.value.items():
        key, existing = keys_of(schema).get(name), entries.get(name)
        if key is None or not isinstance(node.value, dict) or node.replace:
            continue
        below = section_of(key.annotation)
        if below is not None and (existing is None or isinstance(existing.value, dict)):
            entries[name] = _with_defaults(existing or Node({}, DEFAULT), node, below)
        elif existing is None and isinstance(key.default, dict):
            entries[name] = node_of(key.default, DEFAULT)
    return Node(entries, tree.origin)


def node_of(value: Any, origin: Origin) -> Node:
    """Plain Python data as nodes, all of one origin."""
    if isinstance(value, dict):
        return Node({name: node_of(item, origin) for name, item in value.items()}, origin)
    return Node([node_of(item, origin) for item in value] if isinstance(value, (list, tuple)) else value, origin)
