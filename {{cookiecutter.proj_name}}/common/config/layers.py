"""Several files, one tree: `$BASE` is first flattened to an ordered list of files, then each is laid over the last.

Flattening first matters: if bases were merged recursively, a default shared by two bases would be merged twice, and
its second copy would undo the first base's values.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.base.files import PROJECT
from common.config.problem import ABSENT, DEFAULT, ConfigError, Problem, did_you_mean, join, origin_of, shown_path
from common.config.reading import Reader
from common.config.schema import child, keys_of, metadata, section_of
from common.config.source import Node, node_of, read_file


def flatten(path: Path, origin: str | None = None, trail: tuple[Path, ...] = ()) -> dict[Path, Node]:
    """Read a file and all its bases; every base comes before the files built on it.

    Args:
        trail: the files that led here.
    """
    if path in trail:
        loop = " -> ".join(map(shown_path, (*trail, path)))
        raise ConfigError([Problem("$BASE", ABSENT, "the files have a circular $BASE", loop, origin)])
    body = read_file(path)
    given = body.value.pop("$BASE", Node([], DEFAULT))
    reader = Reader(Node({"$BASE": given}, given.origin), dict[str, str | list[str]])
    if reader.problems:
        raise ConfigError(reader.problems)
    bases = reader.values["$BASE"]
    if not isinstance(bases, list):
        bases = [bases]
    done: dict[Path, Node] = {}
    for number, base in enumerate(bases):
        place = origin_of(join("$BASE", number), reader.origins)
        target = find_file("$BASE", str(base), path.parent, place)
        done |= flatten(target, place, (*trail, path))
    done[path] = body
    return done


def find_file(key: str, name: str, folder: Path, origin: str | None = None) -> Path:
    """Find the file `name`, which `key` gives relative to `folder`. Raises `ConfigError`, with a name in configs/."""
    file = os.path.abspath(folder / os.path.expanduser(name))
    if not os.path.isfile(file):  # `os.path`, since methods of `Path` raise on some odd names
        known = {path.name: shown_path(path) for path in PROJECT.glob("configs/*.yaml")}
        hint = did_you_mean(os.path.basename(file), known)
        raise ConfigError([Problem(key, name, f"{file} is not a file", hint, origin)])
    return Path(file)


def merge(base: Node, over: Node, annotation: Any) -> Node:
    """Lay `over` on `base`: mappings are merged, anything else is replaced.

    A new `type` drops the other keys of a free section, which were the old type's arguments. A section with a schema
    keeps its values, since each key means the same under every type. Also kept are keys that are not arguments: those
    in `ignore` of a check on the field (such as a registry's).
    """
    if not isinstance(over.value, dict):
        return over
    problem = over.problem
    if not over.replace:
        problem = problem or base.problem
    entries: dict[str, Node] = {}
    if isinstance(base.value, dict) and not over.replace:
        entries = dict(base.value)
        types = [side["type"].value for side in (entries, over.value) if "type" in side]
        if section_of(annotation) is None and len(types) == 2 and types[0] != types[1]:
            kept: set[str] = set()
            for item in metadata(annotation):
                kept.update(getattr(item, "ignore", ()))
            entries = {name: node for name, node in entries.items() if name in kept}
    elif isinstance(base.value, str) and "${" in base.value and not over.replace:
        problem = f"changes a part of {base.value} ({base.origin}); change that section, or write $REPLACE: true too"
    for name, node in over.value.items():
        entries[name] = merge(entries.get(name, Node(None, DEFAULT)), node, child(annotation, name))
    return replace(over, value=entries, problem=problem)


def with_defaults(node: Node, annotation: Any) -> Node:
    """`node` with the missing keys of all sections in it."""
    if not isinstance(node.value, dict):
        return node
    entries = {}
    schema = section_of(annotation)
    if schema is not None:
        for name, key in keys_of(schema).items():
            if key.default is not ABSENT:
                entries[name] = node_of(key.default, DEFAULT)
    entries |= node.value
    for name, item in entries.items():
        entries[name] = with_defaults(item, child(annotation, name))
    return replace(node, value=entries)
