"""Optional parts of the engine, each a folder of `parts/`: what is there is used; `common` imports it here, by name.

A part fills a seat of the training loop, and its `config.py` adds keys to sections of the configuration. To remove it:
rm -r parts/NAME tests/parts/NAME docs/parts/NAME.md.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from common.base.errors import UserError
from common.base.files import PROJECT

AVERAGE = "ema"
"""The part that fills the seat of averaged weights; like that of any part, its state in a checkpoint has its name."""

KEYS = {
    "checkpoint.after_save": "after_save",
    "checkpoint.frozen": "frozen",
    "debug.print_all_grad": "gradients",
    "dist.reduction": "reduction",
    "dist.shard_size": "fsdp",
    "dist.strategy": "fsdp",
    "optim.bad_steps": "bad_steps",
    f"optim.{AVERAGE}": AVERAGE,
    "optim.groups.args": "optimizers",
    "optim.groups.ndim": "optimizers",
    "optim.groups.optim_type": "optimizers",
    "pictures": "pictures",
    "prepare.fsdp": "fsdp",
    "profile": "profile",
    "speed": "speed",
    "stages": "stages",
}
"""Keys of the configuration, and the part that each needs. A part's state in a checkpoint has its name."""


def installed() -> list[str]:
    """Return the names of the parts that this project has."""
    return sorted(file.parent.name for file in PROJECT.glob("parts/*/__init__.py"))


def part(name: str, module: str) -> ModuleType | None:
    """Return a module of the part `name`; None if this project does not have the part."""
    if name not in installed():
        return None
    return import_module(f"parts.{name}.{module}")


def required(name: str, module: str, asks: str) -> ModuleType:
    """Return a module of the part `name`. Raises `UserError` without the part; `asks` names what needs it."""
    found = part(name, module)
    if found is None:
        raise UserError(f"{asks} {needs_part(name)}")
    return found


def fill(
    name: str,
    module: str,
    empty: Any,
    *arguments: Any,
) -> Any:
    """Return what `build` of the part's module returns, to fill a seat; `empty` without the part."""
    found = part(name, module)
    if found is None:
        return empty
    return found.build(*arguments)


def part_of(key: str) -> str | None:
    """Return the part that brings a dotted key of the configuration; None for a key of the core."""
    key = re.sub(r"\[\d+\]", "", key)
    for own, name in KEYS.items():
        if key == own or key.startswith(f"{own}."):
            return name
    return None


def needs_part(name: str) -> str:
    """Return what is said of something that only an absent part can do."""
    return f"needs parts/{name}, which this project does not have: make add PART={name}"


def refuse_absent(saved: Mapping[str, Any]) -> None:
    """Raise `UserError` if a checkpoint needs a part that this project does not have, for its state or its groups."""
    held = dict(saved)
    for group in saved["about"]["config"]["optim"].get("groups", ()):
        if group.get("optim_type") or group.get("args") or group.get("ndim"):
            held["optimizers"] = group
    for name in KEYS.values():
        if held.get(name) and name not in installed():
            without = "to resume without it: --allow_changes true"
            raise UserError(f"the run of the checkpoint used {name}, which {needs_part(name)}; {without}")


def sections(base: type) -> type:
    """Return a section with what the parts add to it, after its own keys: the classes of its name in their `config.py`.

    Only `config.py` is imported, while the modules that the rest of a part needs are being imported themselves.
    """
    name = base.__name__
    added = [getattr(config, name) for config in _configs() if hasattr(config, name)]
    own = {"__doc__": base.__doc__, "__module__": base.__module__}
    return type(name, (*added, base), own)


def rules(config: Any) -> Iterator[Any]:
    """Yield the problems that the parts find in a whole configuration: `problems(config)` in their `config.py`."""
    for module in _configs():
        if hasattr(module, "problems"):
            yield from module.problems(config)


def safe_keys() -> list[str]:
    """Return the keys of parts of which a resume accepts new values: `SAFE` in their `config.py`."""
    keys: list[str] = []
    for module in _configs():
        keys += getattr(module, "SAFE", ())
    return keys


def _configs() -> list[ModuleType]:
    found = []
    for name in installed():
        if (PROJECT / "parts" / name / "config.py").is_file():
            found.append(import_module(f"parts.{name}.config"))
    return found
