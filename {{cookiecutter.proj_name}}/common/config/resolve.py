"""The doors: `resolve` for code, `parse` for a command line."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from common.base.errors import UserError
from common.config.check import check
from common.config.layers import data_of, flatten, merge, not_a_file, show_defaults, stack
from common.config.overrides import RESERVED, Flag, Layer, read_flags
from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, place
from common.config.shape import nearest, walk
from common.config.show import help_text, with_origins
from common.config.source import Branch, File

T = TypeVar("T")


class Listing(Protocol):
    """What `--list` can print."""

    kind: str

    def table(self) -> str:
        """One entry a line."""
        ...


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A checked configuration.

    `values` is all of it as plain data, defaults filled in; `origins` says where each of them was written, by dotted
    key; `files` are those that were read, bases first. As text: YAML with the origins as comments.
    """

    config: T
    values: dict[str, Any]
    origins: dict[str, Origin]
    files: tuple[Path, ...] = field(default=())

    def __str__(self) -> str:
        return with_origins(self.values, self.origins)


def resolve(
    schema: type[T], files: Sequence[str | Path], overrides: Sequence[str] = (), *, overlay: str | Path | None = None
) -> Resolved[T]:
    """Files and their bases, then the overlay's own values, then command line words, as one checked configuration.

    Raises `ConfigError` with every problem at once.
    """
    flags, problems = read_flags(overrides)
    return _resolve(schema, files, flags, problems, overlay)


def _resolve(
    schema: type[T],
    files: Sequence[str | Path],
    flags: Sequence[Flag],
    problems: list[Problem],
    overlay: str | Path | None,
) -> Resolved[T]:
    read = flatten([_existing(path) for path in files])
    tree = stack(read, schema)
    if overlay is not None:
        over = _own_values(overlay)
        read.append(over)
        tree = _lay(tree, over.body, schema)
    problems = [problem for file in read for problem in file.problems] + problems
    layer = Layer(schema, show_defaults(tree, _mentioned(flags), schema))
    for flag in flags:
        layer.add(flag)
    tree = _lay(tree, layer.body, schema)
    config, places = check(schema, tree, problems + layer.problems)
    values = data_of(config)
    origins = {key: places.get(key, DEFAULT) for key in _leaves(values)}
    return Resolved(config, values, origins, tuple(file.path for file in read))


def _lay(tree: Branch, over: Branch, schema: type) -> Branch:
    laid = merge(show_defaults(tree, over, schema), over, schema)
    assert isinstance(laid, Branch)
    return laid


def _mentioned(flags: Sequence[Flag]) -> Branch:
    """The sections that options go into, as an empty tree: tells `show_defaults` which defaults they may go through."""
    tree = Branch({}, DEFAULT)
    for flag in flags:
        here = tree
        for part in flag.name.removeprefix("--").split(".")[:-1]:
            below = here.entries.setdefault(part, Branch({}, DEFAULT))
            assert isinstance(below, Branch)
            here = below
    return tree


def _existing(path: str | Path) -> Path:
    found = Path(os.path.expanduser(path))
    if problem := not_a_file(found):
        others = found.parent.glob("*.y*ml") if os.path.isdir(found.parent) else ()
        near = nearest(found.name, [other.name for other in others])
        hint = f"did you mean {place(found.parent / near)}?" if near else ""
        raise ConfigError([Problem("--config", str(path), f"this configuration {problem}", hint)])
    return found


def _own_values(path: str | Path) -> File:
    """An overlay: the file without its bases, which the configuration below it has chosen already."""
    return dataclasses.replace(flatten([_existing(path)])[-1], bases=[])


def _leaves(values: Any, key: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [key]
    return [leaf for name, value in values.items() for leaf in _leaves(value, f"{key}.{name}".removeprefix("."))]


def parse(
    schema: type[T],
    argv: Sequence[str],
    *,
    prog: str = "train.py",
    description: str = "",
    registries: Sequence[Listing] = (),
    default: str | Path | None = None,
    debug_overlay: str | Path | None = None,
) -> Resolved[T]:
    """The configuration that a command line asks for.

    `default` is the file to take without `--config`; `debug_overlay` is the file whose own values `--debug` lays over
    it. `--help`, `--print-config` and `--list` print and raise `SystemExit(0)`. Raises `ConfigError` on any mistake.
    """
    clash = [name for name, _ in walk(schema) if f"--{name}" in RESERVED and name != "debug"]
    assert not clash, f"{clash} are options of the command line; rename these keys"
    flags, problems = read_flags(argv)
    options = {flag.name: flag for flag in flags if flag.name in RESERVED}
    if "--help" in options or "-h" in options:
        kinds = tuple(registry.kind for registry in registries)
        _print_and_stop(help_text(schema, prog=prog, description=description, default=str(default or ""), kinds=kinds))
    if "--list" in options:
        _print_and_stop(_listing(options["--list"], registries))
    path = _config_path(options, problems, default, prog)
    overlay = debug_overlay if "--debug" in options else None
    if "--debug" in options and debug_overlay is None:
        problems.append(Problem("--debug", ABSENT, f"{prog} has no debug settings", origin=options["--debug"].origin))
    for name in ("--debug", "--print-config"):
        if name in options and options[name].value is not None:
            rule, origin = "takes no value", options[name].origin
            problems.append(Problem(name, options[name].value, rule, "", origin))
    keys = [flag for flag in flags if flag.name not in RESERVED]
    resolved = _resolve(schema, [path], keys, problems, overlay)
    if "--print-config" in options:
        _print_and_stop(str(resolved))
    return resolved


def _config_path(
    options: dict[str, Flag], problems: list[Problem], default: str | Path | None, prog: str
) -> str | Path:
    given = [options[name] for name in ("--config", "--configs", "-c") if name in options]
    for extra in given[1:]:
        problems.append(Problem(extra.name, extra.value, "the configuration is given twice", "keep one", extra.origin))
    if given and given[0].value:
        return given[0].value
    if given or default is None:
        hint = f"{prog} --config configs/default.yaml; {prog} --help shows every key"
        origin = given[0].origin if given else None
        raise ConfigError([Problem("--config", ABSENT, "needs a file", hint, origin), *problems])
    return default


def _listing(flag: Flag, registries: Sequence[Listing]) -> str:
    if flag.value is None:
        return "\n\n".join(registry.table() for registry in registries)
    asked = flag.value.lower()
    for registry in registries:
        if asked in (registry.kind, f"{registry.kind}s", f"{registry.kind}es"):
            return registry.table()
    kinds = ", ".join(registry.kind for registry in registries)
    raise UserError(f"--list {flag.value}: nothing of this kind is registered; the kinds are {kinds}")


def _print_and_stop(text: str) -> NoReturn:
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
