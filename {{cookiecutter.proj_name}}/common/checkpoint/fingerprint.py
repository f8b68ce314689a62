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
from common.run.environment import machine, packages, version_of
from common.run.record import result_variables

# What a change of an entry of the fingerprint means for the bits of the run. Of all others, the engine cannot tell.
BREAKS_BITS = (
    "torch", "numpy", "cuda", "cudnn", "cudnn flags", "tf32", "matmul precision", "deterministic", "device", "cpu",
    "threads", "ranks", "model", "libraries", "environment.*",
)  # fmt: skip
HARMLESS = tuple(  # they compute nothing: configuration, logs, curves, tests, tools
    f"packages.{name}"
    for name in (
        "absl-py", "certifi", "grpcio", "loguru", "markdown", "mlflow", "packaging", "pip", "pluggy", "protobuf",
        "psutil", "pydantic", "pydantic-core", "pygments", "pytest", "pytest-*", "pyyaml", "requests", "rich",
        "setuptools", "tensorboard", "tensorboard-*", "tqdm", "typing-extensions", "typing-inspection", "urllib3",
        "wandb", "werkzeug",
    )
)  # fmt: skip
_WEIGHTS = {"order": ("seed", "samples per epoch"), "breaks": BREAKS_BITS, "harmless": HARMLESS}
_ASIDE = ("code", "data", "packages", "samples per step", "data position restored")  # compared in ways of their own


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
        The differences in words, by their weight, and what was compared. The weights: `order`, by which other samples
        are trained on, or in another order; `code`; `breaks`, `unsure` and `harmless`, see `BREAKS_BITS`. `missing`
        is what was not compared.
    """
    changed: dict[str, list[str]] = {name: [] for name in ("order", "code", "breaks", "unsure", "harmless", "missing")}
    compared = ["config"]
    shared = {key: value for key, value in new.items() if key in old and key not in _ASIDE}
    missing = [key for key in new if key not in old]
    if "environment" in old:  # a variable that is not set is not recorded
        names = [*old["environment"], *new["environment"]]
        shared["environment"] = {name: new["environment"].get(name, "unset") for name in names}
        old = {**old, "environment": {name: old["environment"].get(name, "unset") for name in names}}
    if "packages" in old:
        now = new["packages"]
        shared["packages"] = {name: now.get(name) or version_of(name) or "not installed" for name in old["packages"]}
        missing += [name for name in now if name not in old["packages"]]  # imported only now
    for change in changes({key: old[key] for key in shared}, shared):
        weight = next((name for name, keys in _WEIGHTS.items() if change.matches(keys)), "unsure")
        changed[weight].append(change.arrow.removeprefix("packages."))
    if "code" in old:
        for change in sorted(changes(old["code"], new["code"]), key=lambda change: change.key):
            mark = " (new)" if change.old is None else " (gone)" if change.new is None else ""
            changed["code"].append(f"{change.key}{mark}")
        compared.insert(0, f"code ({len(new['code'])} files)")
    compared += [f"{len(old['packages']) + 2} packages" if "packages" in old else "torch", "machine"]
    if text := _compare_all_data(old.get("data", {}), new["data"], changed, other_val=other_val):
        compared.append(text)
    if missing:
        changed["missing"].append(f"{', '.join(missing)} (the checkpoint does not record them)")
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        changed["breaks"].append("a GPU without dist.deterministic strict")
    if "compiled" in new["model"]:
        changed["missing"].append("torch.compile, whose code may depend on the shapes that it saw first")
    return changed, ", ".join(compared)


def _compare_all_data(
    old: Mapping[str, Any], new: Mapping[str, Any], changed: dict[str, list[str]], *, other_val: bool
) -> str:
    """Add how the data differ to `changed`. Returns how much of them was compared, in words; "" for nothing."""
    is_elsewhere = bool(changed["breaks"] or changed["unsure"])  # another library or processor may read other bits
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
            is_order = kind == "other" and not is_val and not is_elsewhere
            changed["order" if is_order else "breaks"].append(reason)
    return f"data ({same:,} of {total:,} samples read again: the same)" if same else ""
