"""Record what decides the bits of a run besides its config, and compare it with the record in a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.loader import BatchStream
from common.data.reading import compare_data
from common.distributed import Rank, from_main
from common.distributed.code import code_of
from common.run.environment import machine, packages, versions_of
from common.run.record import result_variables

_SAMPLES = ("seed", "samples per epoch")  # they decide which samples a step has
_ASIDE = ("data", "samples per step", "data position restored")  # compared in ways of their own


@dataclass(frozen=True)
class Change:
    """One key whose value differs between a checkpoint and the config of the run that resumes it."""

    key: str
    old: Any
    new: Any

    def matches(self, patterns: Iterable[str]) -> bool:
        """Return whether the key matches one of `patterns`."""
        return any(fnmatchcase(self.key, pattern) for pattern in patterns)

    @property
    def arrow(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"

    def __str__(self) -> str:
        return f"  {self.key}: {self.old!r} in the checkpoint, {self.new!r} now"


def changes(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Any = None, prefix: str = "") -> Iterator[Change]:
    """Yield the leaves that differ between two resolved configs. `resume` is not compared.

    A key of a section class that the old config lacks, because the project was older, had the effect of its default in
    `defaults`, an object of the class. Any other missing key counts as null.
    """
    for name in dict.fromkeys([*old, *new]):
        section = getattr(defaults, name, None)
        default = asdict(section) if is_dataclass(section) and not isinstance(section, type) else section
        key, before, after = f"{prefix}{name}", old.get(name, default), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, section if is_dataclass(section) else None, f"{key}.")
        elif before != after and key != "resume":
            yield Change(key, before, after)


def fingerprint(rank: Rank, data: BatchStream, seed: int, model: str, read: Mapping[str, Any]) -> dict[str, Any]:
    """Everything besides the config that affects the exact result of a run, as far as it can be known.

    Every process must call this. Packages and data are the main process'.

    Args:
        model: how it was prepared.
        read: what the main process read of the data, by name, see `common.data.reading`.
    """
    versions, read = from_main((packages(), read) if rank.is_main else None, rank) or ({}, {})
    return {
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        **machine(rank.device),
        "ranks": rank.world_size,
        "model": model,
        "samples per step": data.samples_per_step,
        "seed": seed,
        "samples per epoch": data.epoch_size,
        "data position restored": data.is_exactly_resumable,
        "libraries": ", ".join(sorted(Path(path).name for path in torch.ops.loaded_libraries)) or "none",
        "environment": result_variables(),
        "code": code_of(),
        "packages": {name: version for name, version in versions.items() if name not in ("torch", "numpy")},
        "data": read,
    }


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, other_val: bool) -> tuple[dict[str, list[str]], str]:
    """Compare two fingerprints. What the older one does not record is not compared.

    With `other_val`, the config has other validation data, so that they differ is no news.

    Returns:
        The differences in words, by what they change, and what was compared: `samples` are others or in another order;
        `code`; `bits` may differ; `missing` was not compared.
    """
    changed: dict[str, list[str]] = {name: [] for name in ("samples", "code", "bits", "missing")}
    compared = [f"code ({len(new['code'])} files)", "config"] if "code" in old else ["config"]
    before = {key: old.get(key, new[key]) for key in new if key not in _ASIDE}
    recorded = before["packages"]
    installed = versions_of(recorded)
    before["packages"] = {name: recorded[name] for name in installed}
    now = {**new, "packages": installed}
    for change in changes(before, {key: now[key] for key in before}):
        section, _, name = change.key.partition(".")
        if section == "code":
            changed["code"].append(name)
        else:
            kind = "samples" if section in _SAMPLES else "bits"
            changed[kind].append(change.arrow.removeprefix("packages."))
    compared += [f"{len(installed) + 2} packages" if "packages" in old else "torch", "machine"]
    if text := _compare_all_data(old.get("data", {}), new["data"], changed, other_val=other_val):
        compared.append(text)
    unrecorded = [key for key in new if key not in old] + [name for name in new["packages"] if name not in recorded]
    if unrecorded:
        changed["missing"].append(f"{', '.join(unrecorded)} (the checkpoint does not record them)")
    gone = [name for name in recorded if name not in installed]
    if gone:
        changed["missing"].append(f"{', '.join(gone)} (not imported now)")
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        changed["bits"].append("a GPU without dist.deterministic strict")
    if "compiled" in new["model"]:
        changed["missing"].append("torch.compile, whose code may depend on the shapes that it saw first")
    return changed, ", ".join(compared)


def _compare_all_data(
    old: Mapping[str, Any], new: Mapping[str, Any], changed: dict[str, list[str]], *, other_val: bool
) -> str:
    """Add how the data differ to `changed`. Returns how much of them was compared, in words; "" for nothing."""
    same, total = 0, 0
    for name, now in new.items():
        is_val = name.startswith("val")
        if name not in old or (other_val and is_val):
            continue
        kind, reason, count = compare_data(name, old[name], now)
        if kind == "same":
            same += count
            total += now["size"]
        elif kind == "missing":
            changed["missing"].append(reason)
        else:
            changed["samples" if kind == "other" and not is_val else "bits"].append(reason)
    return f"data ({same:,} of {total:,} samples read again: the same)" if same else ""
