"""The command line of the programs: `--config`, keys of the config, `--debug`, `--help`, `--list`, `--print-config`."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from common.base.errors import UserError
from common.config import ABSENT, ConfigError, Problem, Resolved, resolve
from common.config.overrides import read_options
from common.config.registry import REGISTRIES, Registry, file_of
from cli.config_text import help_text, with_origins

T = TypeVar("T")


def parse(
    schema: type[T],
    argv: Sequence[str],
    *,
    prog: str = "train.py",
    description: str = "",
    default: str | Path | None = None,
    debug_overlay: str | Path | None = None,
) -> Resolved[T]:
    """Read the configuration from a command line.

    `default` is the file used without `--config`; `debug_overlay` the file that `--debug` applies on top. `--help`,
    `--print-config` and `--list` print and raise `SystemExit(0)`. Raises `UserError` for mistakes.
    """
    options, _ = read_options(argv)
    if "--help" in options:
        kinds = tuple(registry.kind for registry in REGISTRIES)
        _print_and_stop(help_text(schema, prog=prog, description=description, default=str(default or ""), kinds=kinds))
    if "--list" in options:
        _print_and_stop(_listing(options["--list"].value))
    path = options["--config"].value if "--config" in options else default
    if not path:
        near = get_close_matches("--config", options)
        hint = f"{prog} --config configs/default.yaml; {prog} --help shows every key"
        hint = f"did you mean --config, not {near[0]}?" if near else hint
        raise ConfigError([Problem("--config", ABSENT, "needs a file", hint)])
    overlay = debug_overlay if "--debug" in options else None
    if "--debug" in options and overlay is None:
        raise ConfigError([Problem("--debug", ABSENT, f"{prog} has no debug settings")])
    resolved = resolve(schema, [path], argv, overlay=overlay)
    if "--print-config" in options:
        _print_and_stop(with_origins(resolved.values, resolved.origins))
    return resolved


def _listing(kind: str | None) -> str:
    kinds = [registry.kind for registry in REGISTRIES]
    tables = [table(item) for item in REGISTRIES if kind in (None, item.kind, f"{item.kind}s", f"{item.kind}es")]
    if not tables:
        raise UserError(f"--list {kind}: unknown kind; the kinds are {', '.join(kinds)}")
    return "\n\n".join(tables)


def table(registry: Registry) -> str:
    """List all entries: name, file:line, signature. Raises `ConfigError` if a file cannot be imported."""
    if broken := registry.import_files():
        raise ConfigError(broken)
    rows = [(name, file_of(entry), _signature(entry)) for name, entry in registry.entries().items()]
    widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    lines = [f"  {name:<{widths[0]}}  {where:<{widths[1]}}  {signature}" for name, where, signature in rows]
    left_out = [f"  {line}" for line in registry.left_out]
    return "\n".join([f"{registry.kind}:", *(lines or ["  nothing is registered"]), *left_out])


def _signature(entry: Callable[..., Any]) -> str:
    """Return the arguments of a class or function, without the rules that are attached to their types."""
    function = getattr(entry, "__init__") if isinstance(entry, type) else entry  # noqa: B009 - for the type checker
    types, header = {}, inspect.signature(entry)
    with suppress(NameError):  # a type that is only imported for the type checker
        types = get_type_hints(function)
    arguments = [item.replace(annotation=types.get(name, item.annotation)) for name, item in header.parameters.items()]
    return str(header.replace(parameters=arguments, return_annotation=header.empty))


def _print_and_stop(text: str) -> NoReturn:
    print(text.rstrip("\n"))
    raise SystemExit(0)
