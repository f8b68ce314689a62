"""The guarantee of a resume: which changes of the config are accepted, and how exact the continued run is."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from common.base.errors import UserError
from common.base.parts import safe_keys
from common.checkpoint.fingerprint import Change, changes, compare
from common.checkpoint.state import RunState
from common.config import ConfigError, resolve
from common.config.layers import node_of
from common.config.names import join_names
from common.data.view import innermost
from common.optim.optimizer import parts_of

# Keys that decide when and what a run measures, and thereby its best value, early stopping, perhaps its learning rate.
MEASURING = ("progress.*", "best.*", "early_stop.*", "dataset.val", "dataset.val.*", "metric", "metric.*")
# Keys that decide how a run is executed, not what it trains: a resume accepts new values of these.
SAFE = (
    *MEASURING,
    "name", "resume", "allow_changes", "model_pt", "split", "gpu_ids", "num_workers", "plugins", "dir.*",
    "debug.debug_mode", "debug.print_all_grad", "monitor.*", "profile.*", "checkpoint.*", "init_*", "dataset.eval",
    "dataset.eval.*", *safe_keys(),
    "loader.pin_memory", "loader.prefetch", "loader.persistent", "loader.timeout", "loader.start_method",
    "dist.timeout", "dist.launcher", "dist.processes", "dist.cudnn_benchmark", "dist.distributed_backend",
    "dist.gradient_as_bucket_view", "prepare.activation_checkpointing",
    "prepare.compile.*", "prepare.channels_last",
)  # fmt: skip
# Together these determine the samples of one optimizer step; see `accept_changes`.
_BATCH = ("batch_size", "optim.accumulate")


def accept_changes(saved: Mapping[str, Any], state: RunState, schema: type, allowed: bool) -> str:
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
        config = resolve(schema, [], stored=node_of(config, "")).values
    changed = list(changes(config, state.about["config"]))
    resized = Change("samples per step", old["samples per step"], new["samples per step"])
    is_resized = resized.old != resized.new
    breaking = [change for change in changed if not change.matches(SAFE if is_resized else (*SAFE, *_BATCH))]
    if is_resized:
        changed.append(resized)
        breaking.append(resized)
    if breaking and not (allowed or (state.rank.restarted and breaking == [resized])):
        lines = "\n".join(map(str, breaking))
        if is_resized:
            processes = f"processes ({old['ranks']} then, {new['ranks']} now)"
            lines += f"\n  samples per step must stay the same: batch_size * optim.accumulate * {processes}"
        raise UserError(
            f"cannot resume, since these changes alter what is trained:\n{lines}\n"
            "  Use the old values (--resume FOLDER without --config uses the run's own config), or accept these:\n"
            "  --allow_changes true. For a new run from these weights: --progress.start_epoch 0 --name NEW."
        )
    if any(change.key == "optim.optim_type" for change in breaking):
        raise UserError(
            "optim.optim_type: the state of one optimizer does not fit another; to take only the weights: "
            "--progress.start_epoch 0 --name NEW"
        )
    guarantee = resume_guarantee(saved, state, changed, breaking)
    return "\n".join(["changed since then:", *map(str, changed), guarantee]) if changed else guarantee


def unknowns(run: RunState) -> list[str]:
    """Return what this run relies on but the engine cannot check, for the log.

    Add whatever else the engine cannot check here.
    """
    parts: Mapping[str, Any] = run.parts
    dataset = parts["data"].dataset
    kinds = dict.fromkeys(map(type, parts_of(parts["optimizer"])))
    others = [kind for kind in kinds if not kind.__module__.startswith("torch.optim")]
    reasons = [f"optimizer {_path(kind)} restores its own state" for kind in others]
    schedule = parts["schedule"].code
    if schedule.__module__.split(".")[0] not in ("common", "library"):
        reasons.append(f"schedule {_path(schedule)} must be a function of the step, or restore its own state")
    if not run.fingerprint["data position restored"]:
        reasons.append(f"dataset {_path(type(innermost(dataset)))} starts each epoch over")
    elif callable(getattr(dataset, "state_dict", None)):
        reasons.append(f"dataset {_path(type(innermost(dataset)))} restores its own state")
    reasons += [f"{name}, registered by a plugin, restores its own state" for name in run.user_parts]
    reasons += [f"plugin {name}" for name in run.about["config"]["plugins"]]
    for call in run.about["config"]["checkpoint"].get("after_save", ()):
        name = call if isinstance(call, str) else call["type"]  # its arguments may be credentials
        reasons.append(f"checkpoint.after_save {name}")
    return reasons


def _path(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def resume_guarantee(saved: Mapping[str, Any], run: RunState, changed: list[Change], breaking: list[Change]) -> str:
    """Return the guarantee, for the log: bit-exact, sample-exact, or neither, as far as compared, and why.

    Args:
        changed: all changes of the config; `breaking`: those that alter what is trained.
    """
    old = saved["fingerprint"]
    new = run.fingerprint
    config = run.about["config"]
    if config["dist"].get("reduction") == "fixed":
        old = {**old, "ranks": new["ranks"]}  # any number gives the same bits
    other_val = any(change.matches(["dataset.val", "dataset.val.*"]) for change in changed)
    found = compare(old, new, other_val=other_val)
    found.samples += [change.arrow for change in changed if change in breaking or change.key == "plugins"]
    found.bits += [change.arrow for change in changed if change.matches(_BATCH) and change not in breaking]
    if saved["position"]["sample"] > 0 and not (new["data position restored"] and old["data position restored"]):
        found.samples.append("the dataset cannot restore its position, so the epoch is read again from its start")
    if saved["differing"] and not config["dist"]["broadcast_buffers"]:
        names = join_names(saved["differing"])
        found.bits.append(
            f"{names} differed between the processes, and the checkpoint holds rank 0's: see docs/task.md"
        )
    if saved["unsaved"]:
        found.bits.append(f"training changed {join_names(saved['unsaved'])}, and the checkpoint does not hold it")
    extent = f"as far as compared: {', '.join(found.compared)}"
    if found.samples:
        text = f"not guaranteed to be bit-exact or sample-exact: {'; '.join(found.samples + found.bits)}"
    elif found.bits:
        text = f"sample-exact, not bit-exact ({'; '.join(found.bits)}), {extent}"
    else:
        text = f"bit-exact {extent}, if your code depends on nothing else (other files, variables)"
    unknown = found.unknown + unknowns(run)
    measuring = [change.key for change in changed if change.matches(MEASURING)]
    if measuring:
        unknown.append(
            f"whether a fresh run with this {', '.join(measuring)} has the same schedules and early stopping"
        )
    if unknown:
        text += f"; not compared: {', '.join(unknown)}"
    return f"this resume is {text}"
