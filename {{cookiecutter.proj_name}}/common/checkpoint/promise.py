"""What a resume keeps: which changes of the config it takes, and how exactly it goes on."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch

from common.distributed import Rank
from common.errors import UserError

# Keys that say how a run is carried out, not what it computes: a resume takes new values of these without a word.
SAFE = (
    "name", "resume", "allow_changes", "model_pt", "split", "gpu_ids", "worker", "plugins", "dir.*", "debug.debug_mode",
    "debug.print_all_grad", "monitor.*", "checkpoint.*", "early_stop.*", "best.*", "progress.*", "init_from.*",
    "loader.pin_memory", "loader.prefetch", "loader.persistent", "loader.timeout", "loader.start_method",
    "dist.timeout", "dist.launcher", "dist.processes", "dist.cudnn_benchmark", "dist.distributed_backend",
    "dist.strategy", "dist.gradient_as_bucket_view", "prepare.activation_checkpointing", "prepare.compile.*",
    "prepare.fsdp.blocks", "prepare.fsdp.reshard_after_forward", "prepare.fsdp.cpu_offload",
    "dataset.val", "dataset.val.*", "dataset.eval", "dataset.eval.*", "metric", "metric.*",
)  # fmt: skip
# Of these, what decides when and what a run measures, and so its best value, its early stop, perhaps its rate.
_RHYTHM = ("progress.*", "best.*", "early_stop.*", "dataset.val", "dataset.val.*", "metric", "metric.*")
# Together these make the samples of one optimizer step; see `check_changes`.
_BATCH = ("batch_size", "optim.accumulate")


@dataclass(frozen=True)
class Change:
    """One key whose value differs between a checkpoint and the config of the run that resumes it."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"  {self.key}: {self.old!r} in the checkpoint, {self.new!r} now"


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Leaf by leaf, what differs between two resolved configs. A missing key counts as null; `resume` is no news."""
    for name in dict.fromkeys([*old, *new]):
        key, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, f"{key}.")
        elif before != after and key != "resume":
            yield Change(key, before, after)


def check_changes(
    found: list[Change], old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: bool, elastic: bool = False
) -> tuple[list[Change], list[Change]]:
    """Split changes into those taken as a matter of course and those that alter what is trained.

    Args:
        old, new: fingerprints. While a step has as many samples as before, over all ranks, batch size, accumulation
            and number of ranks may be traded against each other.
        allowed: `allow_changes` of the config.
        elastic: the launcher itself goes on with another number of ranks; that is taken, and told.

    Raises:
        UserError: something that alters the training has changed, and `allowed` is false.
    """
    safe: list[Change] = []
    grave: list[Change] = []
    window, old_window = new["samples per step"], old["samples per step"]
    for change in found:
        by_pattern = any(fnmatchcase(change.key, pattern) for pattern in SAFE)
        traded = change.key in _BATCH and window == old_window
        (safe if by_pattern or traded else grave).append(change)
    if grave and not allowed:
        lines = "\n".join(map(str, grave))
        raise UserError(
            f"the run cannot go on as it began, since this changes what is trained:\n{lines}\n"
            "  Take the old values (--resume FOLDER without --config uses the run's own config), or say that it is\n"
            "  meant: --allow_changes true. For a new run from these weights: --progress.start_epoch 0."
        )
    if window != old_window and not any(change.key in _BATCH for change in grave):
        grave.append(Change("samples per step", old_window, window))
        if not (allowed or elastic):
            raise UserError(
                f"the run cannot go on as it began, on {new['ranks']} process(es) instead of {old['ranks']}:\n"
                f"{grave[-1]}\n"
                f"  batch_size * optim.accumulate * processes must stay {old_window}: change --batch_size or\n"
                "  --optim.accumulate with the number of processes, or say that it is meant: --allow_changes true."
            )
    return safe, grave


class Data(Protocol):
    """What the promise depends on, of the training data."""

    @property
    def window(self) -> int:
        """Samples of one optimizer step, over all ranks."""

    @property
    def epoch_size(self) -> int:
        """Samples of an epoch; 0 when that is not known."""

    @property
    def restores_its_place(self) -> bool:
        """Whether reading goes on exactly at a position."""


def fingerprint(rank: Rank, data: Data, seed: int, model: str) -> dict[str, Any]:
    """Everything that decides the bits of a run besides its config and code. `model`: how it was prepared."""
    on_gpu = rank.device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "device": torch.cuda.get_device_name(rank.device) if on_gpu else f"cpu ({platform.machine()})",
        "ranks": rank.world_size,
        "model": model,
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "samples per step": data.window,
        "seed": seed,
        "samples per epoch": data.epoch_size,
        "data position restored": data.restores_its_place,
    }


def promise(old: Mapping[str, Any], new: Mapping[str, Any], safe: list[Change], grave: list[Change]) -> str:
    """What holds, for the log: bit-exact, sample-exact, or neither, and why. Takes what `check_changes` gives."""
    different = [f"{key} {old.get(key)} -> {new[key]}" for key in new if old.get(key) != new[key]]
    order = [text for text in different if text.startswith(("seed", "samples per epoch"))]
    order += [f"{change.key} {change.old} -> {change.new}" for change in grave]
    if not new["data position restored"]:
        order.append("an iterable data set that cannot restore its place is read again from the start of the epoch")
    if order:
        return "this resume is neither bit-exact nor sample-exact: " + "; ".join(order)
    rhythm = [change.key for change in safe if any(fnmatchcase(change.key, pattern) for pattern in _RHYTHM)]
    since = ""
    if rhythm:
        since = (
            f". With {', '.join(rhythm)} changed, a run that had the new values from its start may differ: in when and "
        )
        since += "what it measured, and in a learning rate that follows the run's length or its validation"
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        different.append("CUDA without dist.deterministic strict")
    if "compiled" in new["model"]:
        different.append("torch.compile, whose code depends on the shapes that came first")
    if not different:
        return f"this resume is bit-exact: weights and metrics will be those of a run that was never stopped{since}"
    ranks = old.get("ranks") != new["ranks"]
    streams = "; the random streams of the ranks (dropout) start anew" if ranks else ""
    return f"this resume is sample-exact, not bit-exact ({'; '.join(different)}): every sample once{streams}{since}"
