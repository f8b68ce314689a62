"""The entry points: `resolve` for code, `parse` for a command line."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from pydantic_core import to_jsonable_python

from common.base.errors import UserError
from common.config.check import check
from common.config.layers import complete, flatten, merge, node_of, not_a_file
from common.config.overrides import layer_of, read_options
from common.config.problem import ABSENT, DEFAULT, RESERVED, ConfigError, Origin, Problem, place
from common.config.reference import help_text
from common.config.references import References
from common.config.registry import Registry
from common.config.schema import nearest
from common.config.show import with_origins
from common.config.source import Node, read_file

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A checked configuration.

    `values` is all of it as plain data, including defaults; `origins` is where each value was written, by dotted key.
    `str()` gives YAML with the origins as comments.
    """

    config: T
    values: dict[str, Any]
    origins: dict[str, Origin]

    def __str__(self) -> str:
        return with_origins(self.values, self.origins)


def resolve(
    schema: type[T], files: Sequence[str | Path], overrides: Sequence[str] = (), *, overlay: str | Path | None = None
) -> Resolved[T]:
    """Files and their bases, then the overlay's own values, then command line words, as one checked configuration.

    Raises `ConfigError` with every problem at once.
    """
    options, problems = read_options(overrides)
    keys = {name: option for name, option in options.items() if name not in RESERVED}
    tree = Node({}, DEFAULT)
    for body in flatten([_existing(path) for path in files]):
        tree = merge(tree, body, schema)
    tree = complete(tree, schema)  # so `--model.width 3` changes the default model, not a model without a type
    if overlay is not None:  # its own values only: the configuration below it already has bases
        body = read_file(_existing(overlay))
        body.value.pop("$BASE", None)
        tree = complete(merge(tree, body, schema), schema)
    tree = complete(merge(tree, layer_of(keys, schema, tree), schema), schema)
    references = References(tree)
    tree = complete(references.resolved(tree) or tree, schema)
    config, origins = check(schema, tree, problems + references.problems)
    return Resolved(config, to_jsonable_python(config), origins)


def overlaid(schema: type[T], *layers: Mapping[str, Any]) -> T:
    """A section from layers of plain values, each laid over the last. Raises `ConfigError`."""
    tree = Node({}, DEFAULT)
    for layer in layers:
        tree = merge(tree, node_of(dict(layer), DEFAULT), schema)
    return check(schema, complete(tree, schema), [])[0]


def _existing(path: str | Path) -> Path:
    found = Path(os.path.expanduser(path))
    if problem := not_a_file(found):
        folders = (Path(__file__).parents[2] / "configs", Path("configs"), found.parent)
        others = {other.name: other for folder in folders if os.path.isdir(folder) for other in folder.glob("*.y*ml")}
        near = nearest(found.name, others)
        hint = f"the working directory is {Path.cwd()}" + (f"; did you mean {place(others[near])}?" if near else "")
        raise ConfigError([Problem("--config", str(path), f"this file {problem}", hint)])
    return found


def parse(
    schema: type[T],
    argv: Sequence[str],
    *,
    prog: str = "train.py",
    description: str = "",
    registries: Sequence[Registry] = (),
    default: str | Path | None = None,
    debug_overlay: str | Path | None = None,
) -> Resolved[T]:
    """The configuration that a command line describes.

    `default` is the file used without `--config`; `debug_overlay` is the file whose own values `--debug` lays over
    it. `--help`, `--print-config` and `--list` print and raise `SystemExit(0)`. Raises `ConfigError` on any mistake.
    """
    options, _ = read_options(argv)
    if "--help" in options:
        kinds = tuple(registry.kind for registry in registries)
        _print_and_stop(help_text(schema, prog=prog, description=description, default=str(default or ""), kinds=kinds))
    if "--list" in options:
        _print_and_stop(_listing(options["--list"].value, registries))
    path = options["--config"].value if "--config" in options else default
    if not path:
        hint = f"{prog} --config configs/default.yaml; {prog} --help shows every key"
        raise ConfigError([Problem("--config", ABSENT, "needs a file", hint)])
    overlay = debug_overlay if "--debug" in options else None
    if "--debug" in options and overlay is None:
        raise ConfigError([Problem("--debug", ABSENT, f"{prog} has no debug settings")])
    resolved = resolve(schema, [path], argv, overlay=overlay)
    if "--print-config" in options:
        _print_and_stop(str(resolved))
    return resolved


def _listing(kind: str | None, registries: Sequence[Registry]) -> str:
    kinds = [registry.kind for registry in registries]
    tables = [each.table() for each in registries if kind in (None, each.kind, f"{each.kind}s", f"{each.kind}es")]
    if not tables:
        raise UserError(f"--list {kind}: unknown kind; the kinds are {', '.join(kinds)}")
    return "\n\n".join(tables)


def _print_and_stop(text: str) -> NoReturn:
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:  # the reader has closed the pipe: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
