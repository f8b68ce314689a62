"""What a resume guarantees: which changes of the config are accepted, and how exact the continued run is."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from common.base.errors import UserError
from common.checkpoint.state import RunState
from common.distributed import Rank
from common.distributed.code import code_of
from common.run.record import RESULT_VARIABLES

# Keys that decide how a run is carried out, not what it computes: a resume accepts new values of these.
SAFE = (
    "name", "resume", "allow_changes", "model_pt", "split", "gpu_ids", "worker", "plugins", "dir.*", "debug.debug_mode",
    "debug.print_all_grad", "monitor.*", "checkpoint.*", "early_stop.*", "best.*", "progress.*", "init_from.*",
    "loader.pin_memory", "loader.prefetch", "loader.persistent", "loader.timeout", "loader.start_method",
    "dist.timeout", "dist.launcher", "dist.processes", "dist.cudnn_benchmark", "dist.distributed_backend",
    "dist.strategy", "dist.gradient_as_bucket_view", "prepare.activation_checkpointing", "prepare.compile.*",
    "prepare.fsdp.blocks", "prepare.fsdp.reshard_after_forward", "prepare.fsdp.cpu_offload",
    "dataset.val", "dataset.val.*", "dataset.eval", "dataset.eval.*", "metric", "metric.*",
)  # fmt: skip
# Of these, the keys that decide when and what a run measures, and so its best value, early stop, perhaps its rate.
_MEASURING = ("progress.*", "best.*", "early_stop.*", "dataset.val", "dataset.val.*", "metric", "metric.*")
# Together these make the samples of one optimizer step; see `check_changes`.
_BATCH = ("batch_size", "optim.accumulate")
_SHOWN = 10  # changed files in a message


@dataclass(frozen=True)
class Change:
    """One key whose value differs between a checkpoint and the config of the run that resumes it."""

    key: str
    old: Any
    new: Any

    @property
    def file(self) -> str:
        """The file, of a change in `code`."""
        suffix = " (new)" if self.old is None else " (gone)" if self.new is None else ""
        return self.key.removeprefix("code.") + suffix

    @property
    def arrow(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"

    def __str__(self) -> str:
        return f"  {self.key}: {self.old!r} in the checkpoint, {self.new!r} now"


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """The leaves that differ between two resolved configs. A missing key counts as null; `resume` is not compared."""
    for name in dict.fromkeys([*old, *new]):
        key, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, f"{key}.")
        elif before != after and key != "resume":
            yield Change(key, before, after)


def check_changes(
    found: list[Change], old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: bool, elastic: bool = False
) -> tuple[list[Change], list[Change]]:
    """Split changes into safe ones and breaking ones, which alter what is trained.

    Args:
        old, new: fingerprints. While a step has as many samples as before, over all ranks, batch size, accumulation
            and number of ranks may be traded against each other.
        allowed: `allow_changes` of the config.
        elastic: the launcher restarted the run with another number of ranks; that is accepted, and logged.

    Raises:
        UserError: something that alters the training has changed, and `allowed` is false.
    """
    safe: list[Change] = []
    breaking: list[Change] = []
    window, old_window = new["samples per step"], old["samples per step"]
    for change in found:
        by_pattern = any(fnmatchcase(change.key, pattern) for pattern in SAFE)
        traded = change.key in _BATCH and window == old_window
        (safe if by_pattern or traded else breaking).append(change)
    if breaking and not allowed:
        lines = "\n".join(map(str, breaking))
        raise UserError(
            f"cannot resume, since these changes alter what is trained:\n{lines}\n"
            "  Use the old values (--resume FOLDER without --config uses the run's own config), or accept the\n"
            "  changes: --allow_changes true. For a new run from these weights: --progress.start_epoch 0."
        )
    if window != old_window and not any(change.key in _BATCH for change in breaking):
        breaking.append(Change("samples per step", old_window, window))
        if not (allowed or elastic):
            raise UserError(
                f"cannot resume on {new['ranks']} process(es) instead of {old['ranks']}, since that alters the steps:\n"
                f"{breaking[-1]}\n"
                f"  batch_size * optim.accumulate * processes must stay {old_window}: change --batch_size or\n"
                "  --optim.accumulate with the number of processes, or accept the change: --allow_changes true."
            )
    return safe, breaking


class Data(Protocol):
    """What the guarantee depends on, of the training data."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""

    @property
    def epoch_size(self) -> int:
        """Samples of an epoch; 0 when that is not known."""

    @property
    def is_exactly_resumable(self) -> bool:
        """Whether reading goes on exactly at a position."""


def fingerprint(rank: Rank, data: Data, seed: int, model: str) -> dict[str, Any]:
    """Everything besides the config that decides the bits of a run. `model`: how it was prepared."""
    on_gpu = rank.device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() if on_gpu else "not used",
        "device": torch.cuda.get_device_name(rank.device) if on_gpu else f"cpu ({platform.machine()})",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "ranks": rank.world_size,
        "model": model,
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "samples per step": data.samples_per_step,
        "seed": seed,
        "samples per epoch": data.epoch_size,
        "data position restored": data.is_exactly_resumable,
        "libraries": ", ".join(sorted(Path(path).name for path in torch.ops.loaded_libraries)) or "none",
        "environment": {name: os.environ.get(name, "unset") for name in RESULT_VARIABLES},
        "code": code_of(),
    }


def accept_changes(saved: Mapping[str, Any], run: RunState, allowed: bool, rank: Rank) -> str:
    """Compare a checkpoint's state with the run that resumes it. Returns what has changed, and what holds, for the log.

    Args:
        allowed: `allow_changes` of the config.

    Raises:
        UserError: something that alters the training has changed, and `allowed` is false.
    """
    old, new = saved["fingerprint"], run.fingerprint
    found = list(changes(saved["about"]["config"], run.about["config"]))
    safe, breaking = check_changes(found, old, new, allowed=allowed, elastic=rank.restarted)
    if any(change.key == "optim.optim_type" for change in breaking):
        raise UserError(
            "optim.optim_type: the state of one optimizer does not fit another; to take only the weights: "
            "--progress.start_epoch 0"
        )
    guarantee = resume_guarantee(old, new, safe, breaking)
    return "\n".join(["changed since then:", *map(str, safe + breaking), guarantee]) if safe or breaking else guarantee


def resume_guarantee(old: Mapping[str, Any], new: Mapping[str, Any], safe: list[Change], breaking: list[Change]) -> str:
    """What holds, for the log: bit-exact, sample-exact, or neither, and why. Takes what `check_changes` gives."""
    known = [key for key in new if key in old]  # a checkpoint of an earlier version has fewer entries
    differing = list(changes({key: old[key] for key in known}, {key: new[key] for key in known}))
    code = _code_changes([change for change in differing if change.key.startswith("code.")], safe, "code" in known)
    different = [change.arrow for change in differing if not change.key.startswith("code.")]
    order = [text for text in different if text.startswith(("seed", "samples per epoch"))]
    order += [change.arrow for change in breaking]
    if not new["data position restored"]:
        order.append("an iterable data set that cannot restore its place is read again from the start of the epoch")
    if order:
        return "this resume is neither bit-exact nor sample-exact: " + "; ".join(order + code)
    different += [change.arrow for change in safe if change.key in _BATCH]
    if unknown := [key for key in new if key not in (*known, "code")]:
        different.append(f"not in the checkpoint: {', '.join(unknown)}")
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        different.append("CUDA without dist.deterministic strict")
    if "compiled" in new["model"]:
        different.append("torch.compile, whose code depends on the shapes that it saw first")
    note = _measuring_note(safe)
    if code:
        besides = f"; besides: {'; '.join(different)}" if different else ""
        return (
            f"this resume is not guaranteed to be bit-exact or sample-exact, since {code[0]}; state and place in the "
            f"data are those of the checkpoint{besides}{note}"
        )
    if not different:
        return f"this resume is bit-exact: weights and metrics will be those of a run that was never stopped{note}"
    streams = "; the random streams of the ranks (dropout) start again" if old.get("ranks") != new["ranks"] else ""
    return f"this resume is sample-exact, not bit-exact ({'; '.join(different)}): every sample once{streams}{note}"


def _code_changes(files: list[Change], safe: list[Change], known: bool) -> list[str]:
    """One text that names the changed code, of the project's packages and of plug-ins; none without a change."""
    if not known:
        return ["the checkpoint does not record the code"]
    names = sorted(change.file for change in files) + [change.arrow for change in safe if change.key == "plugins"]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"the code changed: {', '.join(names[:_SHOWN])}{more}"] if names else []


def _measuring_note(safe: list[Change]) -> str:
    """A sentence on changed keys that decide when and what a run measures; empty without any."""
    keys = [change.key for change in safe if any(fnmatchcase(change.key, pattern) for pattern in _MEASURING)]
    if not keys:
        return ""
    return (
        f". With {', '.join(keys)} changed, a run that had the new values from its start may differ: in when and "
        "what it measured, and in a learning rate that follows the run's length or its validation"
    )
