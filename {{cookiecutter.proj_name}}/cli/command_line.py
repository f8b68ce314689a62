"""The command line of the programs: `--config`, keys of the config, `--debug`, `--help`, `--list`, `--print-config`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.base.errors import UserError
from common.config import ABSENT, ConfigError, Problem, Resolved, resolve
from common.config.arguments import parameters
from common.config.overrides import read_options
from common.config.registry import REGISTRIES, Registry, file_of
from common.config.schema import bare
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
    path = default
    if "--config" in options:
        path = options["--config"].value
    if not path:
        hint = f"{prog} --config configs/default.yaml; {prog} --help shows every key"
        raise ConfigError([Problem("--config", ABSENT, "needs a file", hint)])
    overlay = None
    if "--debug" in options:
        overlay = debug_overlay
        if overlay is None:
            raise ConfigError([Problem("--debug", ABSENT, f"{prog} has no debug settings")])
    resolved = resolve(schema, [path], argv, overlay=overlay)
    if "--print-config" in options:
        _print_and_stop(with_origins(resolved.values, resolved.origins))
    return resolved


def _listing(kind: str | None) -> str:
    tables = []
    for registry in REGISTRIES:
        name = registry.kind
        if kind in (None, name, f"{name}s", f"{name}es"):
            tables.append(table(registry))
    if not tables:
        kinds = ", ".join(registry.kind for registry in REGISTRIES)
        raise UserError(f"--list {kind}: unknown kind; the kinds are {kinds}")
    return "\n\n".join(tables)


def table(registry: Registry) -> str:
    """List all entries: name, file:line, signature. Raises `ConfigError` if a file cannot be imported."""
    broken = registry.import_files()
    if broken:
        raise ConfigError(broken)
    entries = registry.entries()
    lines = [f"{registry.kind}:"]
    width = max(map(len, entries), default=0)
    for name, entry in entries.items():
        lines.append(f"  {name:<{width}}  {file_of(entry)}  {_signature(entry)}")
    if not entries:
        lines.append("  nothing is registered")
    return "\n  ".join(["\n".join(lines), *registry.left_out])


def _signature(entry: Callable[..., Any]) -> str:
    """Return the arguments of a class or function, without the rules that are attached to their types."""
    arguments = []
    for parameter in parameters(entry)[0].values():
        arguments.append(str(parameter.replace(annotation=bare(parameter.annotation))))
    return f"({', '.join(arguments)})"


def _print_and_stop(text: str) -> NoReturn:
    print(text.rstrip("\n"))
    raise SystemExit(0)
