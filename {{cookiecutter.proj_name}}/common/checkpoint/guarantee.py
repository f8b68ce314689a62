"""What a resume guarantees: which changes of the config are accepted, and how exact the continued run is."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.base.errors import UserError
from common.checkpoint.state import RunState
from common.data.loader import BatchStream
from common.distributed import Rank
from common.distributed.code import code_of
from common.run.record import RESULT_VARIABLES

# Keys that decide when and what a run measures, and thereby its best value, early stopping, perhaps its rate.
_MEASURING = ("progress.*", "best.*", "early_stop.*", "dataset.val", "dataset.val.*", "metric", "metric.*")
# Keys that decide how a run is carried out, not what it trains: a resume accepts new values of these.
SAFE = (
    *_MEASURING,
    "name", "resume", "allow_changes", "model_pt", "split", "gpu_ids", "worker", "plugins", "dir.*", "debug.debug_mode",
    "debug.print_all_grad", "monitor.*", "profile.*", "checkpoint.*", "init_from.*", "dataset.eval", "dataset.eval.*",
    "loader.pin_memory", "loader.prefetch", "loader.persistent", "loader.timeout", "loader.start_method",
    "dist.timeout", "dist.launcher", "dist.processes", "dist.cudnn_benchmark", "dist.distributed_backend",
    "dist.strategy", "dist.gradient_as_bucket_view", "prepare.activation_checkpointing", "prepare.compile.*",
    "prepare.channels_last", "prepare.fsdp.blocks", "prepare.fsdp.reshard_after_forward", "prepare.fsdp.cpu_offload",
)  # fmt: skip
# Together these determine the samples of one optimizer step; see `accept_changes`.
_BATCH = ("batch_size", "optim.accumulate")
_SHOWN = 10  # changed files in a message


@dataclass(frozen=True)
class Change:
    """One key whose value differs between a checkpoint and the config of the run that resumes it."""

    key: str
    old: Any
    new: Any

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether the key matches one of `patterns`."""
        return any(fnmatchcase(self.key, pattern) for pattern in patterns)

    @property
    def arrow(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"

    def __str__(self) -> str:
        return f"  {self.key}: {self.old!r} in the checkpoint, {self.new!r} now"


def changes(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Any = None, prefix: str = "") -> Iterator[Change]:
    """The leaves that differ between two resolved configs. `resume` is not compared.

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


def fingerprint(rank: Rank, data: BatchStream, seed: int, model: str) -> dict[str, Any]:
    """Everything besides the config that affects the exact result of a run. `model`: how it was prepared."""
    on_gpu = rank.device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() if on_gpu else "not used",
        "device": torch.cuda.get_device_name(rank.device) if on_gpu else f"{rank.device.type} ({platform.machine()})",
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


def accept_changes(saved: Mapping[str, Any], run: RunState, defaults: Any, allowed: bool, rank: Rank) -> str:
    """Compare a checkpoint's state with the run that resumes it. Returns the changes and the guarantee, for the log.

    As long as a step has as many samples as before, over all ranks, batch size, accumulation and number of ranks may be
    traded against each other. If a launcher restarted the run with another number of ranks, even that may change.

    Args:
        defaults: a config with the default of every key.
        allowed: `allow_changes` of the config.

    Raises:
        UserError: a change alters the training and `allowed` is false, or the optimizer is another one.
    """
    old, new = saved["fingerprint"], run.fingerprint
    found = list(changes(saved["about"]["config"], run.about["config"], defaults))
    resized = Change("samples per step", old["samples per step"], new["samples per step"])
    is_resized = resized.old != resized.new
    safe = [change for change in found if change.matches(SAFE if is_resized else (*SAFE, *_BATCH))]
    breaking = [change for change in found if change not in safe] + ([resized] if is_resized else [])
    if breaking and not (allowed or (rank.restarted and breaking == [resized])):
        lines = "\n".join(map(str, breaking))
        if is_resized:
            processes = f"processes ({old['ranks']} then, {new['ranks']} now)"
            lines += f"\n  samples per step must stay the same: batch_size * optim.accumulate * {processes}"
        fits = "if the weights still fit the model, " * any(each.matches(["model.*"]) for each in breaking)
        raise UserError(
            f"cannot resume, since these changes alter what is trained:\n{lines}\n"
            f"  Use the old values (--resume FOLDER without --config uses the run's own config), or {fits}accept\n"
            "  these: --allow_changes true. For a new run from these weights: --progress.start_epoch 0 --name NEW."
        )
    if any(change.key == "optim.optim_type" for change in breaking):
        raise UserError(
            "optim.optim_type: the state of one optimizer does not fit another; to take only the weights: "
            "--progress.start_epoch 0 --name NEW"
        )
    guarantee = resume_guarantee(old, new, safe, breaking)
    return "\n".join(["changed since then:", *map(str, safe + breaking), guarantee]) if safe or breaking else guarantee


def resume_guarantee(old: Mapping[str, Any], new: Mapping[str, Any], safe: list[Change], breaking: list[Change]) -> str:
    """The guarantee, for the log: bit-exact, sample-exact, or neither, and why.

    Args:
        old, new: fingerprints.
        safe, breaking: changes of the config.
    """
    found = list(changes({"code": {}, **old}, new))
    differing = [change for change in found if not change.matches(["code.*"])]
    code = _changed_code([change for change in found if change.matches(["code.*"])], safe)
    order = [change.arrow for change in differing if change.key in ("seed", "samples per epoch")]
    order += [change.arrow for change in breaking]
    if not new["data position restored"]:
        order.append("an iterable data set that cannot restore its place is read again from the start of the epoch")
    if order:
        return "this resume is neither bit-exact nor sample-exact: " + "; ".join(order + code)
    reasons = [change.arrow for change in differing + [change for change in safe if change.matches(_BATCH)]]
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        reasons.append("CUDA without dist.deterministic strict")
    if "compiled" in new["model"]:
        reasons.append("torch.compile, whose code depends on the shapes that it saw first")
    if code:
        text = (
            f"not guaranteed to be bit-exact or sample-exact, since {'; '.join(code + reasons)}; state and place in "
            "the data are those of the checkpoint"
        )
    elif reasons:
        text = f"sample-exact, not bit-exact ({'; '.join(reasons)}): every sample is used once"
        if old["ranks"] != new["ranks"]:
            text += "; the random streams of the ranks (dropout) start again"
    else:
        text = "bit-exact: weights and metrics will be those of a run that was never stopped"
    if measuring := ", ".join(change.key for change in safe if change.matches(_MEASURING)):
        text += (
            f". A run with the new {measuring} from its start might have measured other values or at other steps, "
            "and had another learning rate where that depends on its length or on validation"
        )
    return f"this resume is {text}"


def _changed_code(files: list[Change], safe: list[Change]) -> list[str]:
    """A list of one text that names the changed code (project packages, plug-ins); empty without a change."""
    names = [
        change.key.removeprefix("code.") + ("" if change.old and change.new else " (gone)" if change.old else " (new)")
        for change in sorted(files, key=lambda change: change.key)
    ]
    names += [change.arrow for change in safe if change.key == "plugins"]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"the code changed: {', '.join(names[:_SHOWN])}{more}"] if names else []
