"""How exact a resume is: what decides the bits of a run is recorded, compared, and said in one sentence."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from common.base.errors import UserError
from common.base.parts import needs_part, part, safe_keys
from common.checkpoint.file import State
from common.checkpoint.state import RunState
from common.config import ConfigError, resolve
from common.config.problem import join_names
from common.distributed import Rank, from_main
from common.distributed.group import code_of
from common.run.record import machine, packages, result_variables, versions_of

NOT_EXACT = "not guaranteed to be bit-exact or sample-exact"
_SAMPLES_PER_STEP = "samples per step"
_CONDITION = "your code, and what it imports, restores its state and depends on nothing else (other files, variables)"
_SAMPLES = ("seed", "samples per epoch")  # they decide which samples a step has
_COMPARED_ELSEWHERE = ("data", _SAMPLES_PER_STEP, "data position restored")  # compared in ways of their own


@dataclass(frozen=True)
class Change:
    """One key whose value differs between a checkpoint and the config of the run that resumes it."""

    key: str
    old: Any
    new: Any

    def matches(self, patterns: Iterable[str]) -> bool:
        """Return whether the key matches one of `patterns`."""
        return any(fnmatchcase(self.key, pattern) for pattern in patterns)

    def __str__(self) -> str:
        if self.key == "checkpoint.after_save":  # the arguments may be credentials
            return f"{self.key} has changed"
        return f"{self.key} {self.old} -> {self.new}"


def changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    prefix: str = "",
) -> Iterator[Change]:
    """Yield the leaves that differ between two resolved configs, except `resume`; a missing key counts as null."""
    for name in dict.fromkeys([*old, *new]):
        key = f"{prefix}{name}"
        before = old.get(name)
        after = new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, f"{key}.")
        elif before != after and repr(before) != repr(after) and key != "resume":  # NaN differs from itself
            yield Change(key, before, after)


def fingerprint(
    rank: Rank,
    loaders: Mapping[str, Any],
    seed: int,
    model: str,
) -> dict[str, Any]:
    """Everything besides the config that affects the exact result of a run, as far as it can be known.

    Every process must call this. Packages and data are the main process'.

    Args:
        loaders: of the data that affect the result, by name; `train` is the stream.
        model: how it was prepared.
    """
    data = loaders["train"]
    read = {}
    if rank.is_main:
        check = part("data_check", "reading")
        if check is not None:
            read = check.read_data(loaders)
    versions, read = from_main((packages(), read), rank)  # every process
    return {
        **machine(rank.device),
        "ranks": rank.world_size,
        "model": model,
        _SAMPLES_PER_STEP: data.samples_per_step,
        "seed": seed,
        "samples per epoch": data.epoch_size,
        "data position restored": data.is_exactly_resumable,
        "libraries": sorted(Path(path).name for path in torch.ops.loaded_libraries),
        "environment": result_variables(),
        "code": code_of(),
        "packages": versions,
        "data": read,
    }


@dataclass
class Comparison:
    """Two fingerprints, compared.

    Attributes:
        compared: what was, in words.
        samples: differences, in words, that may change the samples or their order.
        bits: differences that may change only the last bits.
        unknown: what was not compared, and why.
    """

    compared: list[str]
    samples: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def compare(old: State, new: State) -> Comparison:
    """Compare two fingerprints."""
    installed = versions_of(old["packages"])
    found = Comparison([f"code ({len(new['code'])} files)", "config", f"{len(installed)} packages", "machine"])
    files = []
    for change in changes(old, {**new, "packages": installed}):
        section, _, name = change.key.partition(".")
        if section == "code":
            files.append(name)
        elif section in _SAMPLES:
            found.samples.append(str(change))
        elif section not in _COMPARED_ELSEWHERE:
            found.bits.append(str(change).removeprefix("packages."))
    if files:
        found.samples.append(f"the code changed: {join_names(files, 10)}")
    check = part("data_check", "compare")
    if check is None:
        found.unknown.append(f"the data ({needs_part('data_check')})")
    else:
        check.compare_data(old["data"], new["data"], found)
    if not new["device"].startswith("cpu") and not new["deterministic"]:
        found.bits.append("a GPU without dist.deterministic strict")
    if "compiled" in new["model"]:
        found.unknown.append("torch.compile, whose code may depend on the shapes that it saw first")
    return found


# Keys that decide when and what a run measures, and thereby its best value, early stopping, perhaps its learning rate.
MEASURING = ("progress.*", "best.*", "early_stop.*", "dataset.val", "dataset.val.*", "metric", "metric.*")
# Keys that decide how a run is executed, not what it trains: a resume accepts new values of these.
SAFE = (
    *MEASURING,
    "name", "resume", "allow_changes", "model_pt", "split", "gpu_ids", "num_workers", "plugins", "dir.*",
    "debug.debug_mode", "monitor.*", "profile.*", "checkpoint.*", "init_*", "dataset.eval",
    "dataset.eval.*", *safe_keys(),
    "loader.prefetch", "loader.timeout", "loader.start_method",
    "dist.timeout", "dist.launcher", "dist.processes", "dist.cudnn_benchmark", "dist.distributed_backend",
    "prepare.activation_checkpointing", "prepare.compile.*", "prepare.channels_last",
)  # fmt: skip
# Together these determine the samples of one optimizer step; see `accept_changes`.
_BATCH = ("batch_size", "optim.accumulate")


def accept_changes(saved: State, state: RunState, schema: type, allowed: bool) -> str:
    """Compare a checkpoint's state with the run that resumes it. Returns the changes and the guarantee, for the log.

    As long as a step has as many samples as before, over all ranks, batch size, accumulation and number of ranks may be
    traded against each other. If a launcher restarted the run with a different number of ranks, even that may change.

    Args:
        schema: the class of the config.
        allowed: `allow_changes` of the config.

    Raises:
        UserError: a change alters what is trained and `allowed` is false, or the optimizer is a different one.
    """
    old = saved["fingerprint"]
    new = state.fingerprint
    config = saved["about"]["config"]
    with suppress(ConfigError):  # without keys that this version does not have, and with its defaults
        config = resolve(schema, [], stored=config).values
    before = {**config, _SAMPLES_PER_STEP: old[_SAMPLES_PER_STEP]}
    now = {**state.about["config"], _SAMPLES_PER_STEP: new[_SAMPLES_PER_STEP]}
    changed = list(changes(before, now))
    accepted = SAFE
    if old[_SAMPLES_PER_STEP] == new[_SAMPLES_PER_STEP]:
        accepted += _BATCH
    breaking = [change for change in changed if not change.matches(accepted)]
    keys = [change.key for change in breaking]
    if state.rank.restarted and keys == [_SAMPLES_PER_STEP]:  # a launcher may restart with another number of processes
        allowed = True
    if breaking and not allowed:
        lines = _lines(breaking)
        if _SAMPLES_PER_STEP in keys:
            processes = f"processes ({old['ranks']} then, {new['ranks']} now)"
            lines += f"\n  {_SAMPLES_PER_STEP} must stay the same: batch_size * optim.accumulate * {processes}"
        raise UserError(
            f"cannot resume, since these changes alter what is trained:{lines}\n"
            "  Use the old values (--resume FOLDER without --config uses the run's own config), or accept these:\n"
            "  --allow_changes true. For a new run from these weights: --init_from.path FILE --name NEW."
        )
    if "optim.optim_type" in keys:
        raise UserError(
            "optim.optim_type: the state of one optimizer does not fit another; for a new run from the weights: "
            "--init_from.path FILE --name NEW"
        )
    guarantee = resume_guarantee(saved, state, changed, breaking)
    if not changed:
        return guarantee
    return f"changed since then:{_lines(changed)}\n{guarantee}"


def _lines(changed: list[Change]) -> str:
    return "".join(f"\n  {change}" for change in changed)


def resume_guarantee(
    saved: State,
    run: RunState,
    changed: list[Change],
    breaking: list[Change],
) -> str:
    """Return the guarantee, for the log: bit-exact, sample-exact, or neither, as far as compared, and why.

    Args:
        changed: all changes of the config; `breaking`: those that alter what is trained.
    """
    old = saved["fingerprint"]
    new = run.fingerprint
    config = run.about["config"]
    if config["dist"].get("reduction") == "fixed":
        old = {**old, "ranks": new["ranks"]}  # any number gives the same bits
    found = compare(old, new)
    for change in changed:
        if change in breaking or change.key == "plugins":
            found.samples.append(str(change))
        elif change.matches(_BATCH):
            found.bits.append(str(change))
    is_restored = old["data position restored"] and new["data position restored"]
    if saved["position"]["sample"] > 0 and not is_restored:
        found.samples.append("the dataset cannot restore its position, so the epoch is read again from its start")
    if saved["differing"] and not config["dist"]["broadcast_buffers"]:
        names = join_names(saved["differing"])
        found.bits.append(f"{names} differed between the processes, and the checkpoint has rank 0's: docs/task.md")
    if saved["unsaved"]:
        found.bits.append(f"training changed {join_names(saved['unsaved'])}, and the checkpoint does not hold it")
    extent = f"as far as compared: {', '.join(found.compared)}, if {_CONDITION}"
    differences = "; ".join(found.samples + found.bits)
    if found.samples:
        text = f"{NOT_EXACT}: {differences}"
    elif found.bits:
        text = f"sample-exact, not bit-exact ({differences}), {extent}"
    else:
        text = f"bit-exact {extent}"
    measuring = ", ".join(change.key for change in changed if change.matches(MEASURING))
    if measuring:
        found.unknown.append(f"whether a fresh run with this {measuring} has the same schedules and early stopping")
    if found.unknown:
        text += f"; not compared: {', '.join(found.unknown)}"
    return f"this resume is {text}"
