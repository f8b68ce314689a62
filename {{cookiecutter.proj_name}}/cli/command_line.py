"""The command line of the programs: `--config`, keys of the config, `--debug`, `--help`, `--list`, `--print-config`."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.base.errors import UserError
from common.base.files import PROJECT
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
    default: str | Path | None = None,
    stored: Mapping[str, Any] | None = None,
    origin: str = "the config of the run",
) -> Resolved[T]:
    """Read the configuration from a command line.

    `default` is the file used without `--config`, unless the config of a run is `stored` at `origin`. `--help`,
    `--print-config` and `--list` print and raise `SystemExit(0)`. Raises `UserError` for mistakes.
    """
    options, problems = read_options(argv)
    if "--help" in options:
        _print_and_stop(help_text(schema, prog, str(default or "none")))
    if "--list" in options:
        _print_and_stop(_listing(options["--list"].value))
    files: list[Any] = [default]
    if "--config" in options:
        files = [options["--config"].value]
        stored = None
    if stored is not None:
        files = []
    if files in ([None], [""]):
        hint = f"{prog} --config configs/default.yaml, or --resume experiments/NAME; {prog} --help shows every key"
        raise ConfigError([*problems, Problem("--config", ABSENT, "needs a file", hint)])
    if "--debug" in options:
        files.append(PROJECT / "configs" / "debug.yaml")
    resolved = resolve(schema, files, argv, stored=stored, origin=origin)
    if "--print-config" in options:
        _print_and_stop(with_origins(resolved.values, resolved.origins))
    return resolved


def _listing(kind: str | None) -> str:
    tables = []
    for registry in REGISTRIES:
        if kind is None or kind.startswith(registry.kind):  # also in the plural
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
        typed = [each.replace(annotation=bare(each.annotation)) for each in parameters(entry)[0].values()]
        arguments = ", ".join(map(str, typed))
        lines.append(f"  {name:<{width}}  {file_of(entry)}  ({arguments})")
    return "\n  ".join(["\n".join(lines), *registry.left_out])


def _print_and_stop(text: str) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may be gone: `| head`
    print(text)
    raise SystemExit(0)
