"""Record what decides the bits of a run besides its config, and compare it with the record in a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config.names import join_names
from common.data.loader import BatchStream
from common.data.reading import compare_data
from common.distributed import Rank, from_main
from common.distributed.group import code_of
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
        if self.key == "checkpoint.after_save":  # the arguments may be credentials
            return f"  {self.key} is not what it was in the checkpoint"
        return f"  {self.key}: {self.old!r} in the checkpoint, {self.new!r} now"


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Yield the leaves that differ between two resolved configs, except `resume`; a missing key counts as null."""
    for name in dict.fromkeys([*old, *new]):
        key = f"{prefix}{name}"
        before = old.get(name)
        after = new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, f"{key}.")
        elif before != after and key != "resume":
            yield Change(key, before, after)


def fingerprint(rank: Rank, data: BatchStream, seed: int, model: str, read: Mapping[str, Any]) -> dict[str, Any]:
    """Everything besides the config that affects the exact result of a run, as far as it can be known.

    Every process must call this. Packages and data are the main process'.

    Args:
        model: how it was prepared.
        read: what the main process read of the data, by name, see `common.data.reading`.
    """
    versions = packages() if rank.is_main else {}
    versions, read = from_main((versions, read), rank)
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


@dataclass
class Comparison:
    """Two fingerprints, compared.

    Attributes:
        compared: what was, in words.
        samples: differences, in words, after which the samples may be others, or in another order.
        bits: differences after which only the bits may be others.
        unknown: what was not compared, and why.
    """

    compared: list[str]
    samples: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, other_val: bool) -> Comparison:
    """Compare two fingerprints. With `other_val`, the config itself has other validation data."""
    installed = versions_of(old["packages"])
    found = Comparison([f"code ({len(new['code'])} files)", "config", f"{len(installed) + 2} packages", "machine"])
    before = {key: value for key, value in old.items() if key not in _ASIDE}
    now = {key: value for key, value in new.items() if key not in _ASIDE}
    files = []
    for change in changes(before, {**now, "packages": installed}):
        section, _, name = change.key.partition(".")
        if section == "code":
            files.append(name)
        elif section in _SAMPLES:
            found.samples.append(change.arrow)
        else:
            found.bits.append(change.arrow.removeprefix("packages."))
    if files:
        found.samples.append(f"the code changed: {join_names(files, 10)}")
    _compare_all_data(old["data"], new["data"], found, other_val=other_val)
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        found.bits.append("a GPU without dist.deterministic strict")
    if "compiled" in new["model"]:
        found.unknown.append("torch.compile, whose code may depend on the shapes that it saw first")
    return found


def _compare_all_data(old: Mapping[str, Any], new: Mapping[str, Any], found: Comparison, *, other_val: bool) -> None:
    """Add how the data differ, and how much of them was compared."""
    same = 0
    total = 0
    for name, now in new.items():
        is_val = name.startswith("val")
        if name not in old or (other_val and is_val):
            continue
        kind, reason, count = compare_data(name, old[name], now)
        if kind == "same":
            same += count
            total += now["size"]
        elif kind == "missing":
            found.unknown.append(reason)
        elif kind == "other" and not is_val:
            found.samples.append(reason)
        else:
            found.bits.append(reason)
    if same:
        found.compared.append(f"data ({same:,} of {total:,} samples read again: the same)")
