"""The guarantee of a resume: which changes of the config are accepted, and how exact the continued run is."""

from collections.abc import Mapping
from typing import Any

from common.base.errors import UserError
from common.base.parts import safe_keys
from common.checkpoint.fingerprint import Change, changes, compare
from common.checkpoint.state import RunState
from common.config.names import join_names
from common.config.record import known_part
from common.data.view import innermost
from common.distributed import Rank
from common.optim.several import parts_of

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


def accept_changes(saved: Mapping[str, Any], run: RunState, defaults: Any, allowed: bool, rank: Rank) -> str:
    """Compare a checkpoint's state with the run that resumes it. Returns the changes and the guarantee, for the log.

    As long as a step has as many samples as before, over all ranks, batch size, accumulation and number of ranks may be
    traded against each other. If a launcher restarted the run with a different number of ranks, even that may change.

    Args:
        defaults: a config with the default of every key.
        allowed: `allow_changes` of the config.

    Raises:
        UserError: a change alters what is trained and `allowed` is false, or the optimizer is a different one.
    """
    old, new = saved["fingerprint"], run.fingerprint
    config, gone = known_part(saved["about"]["config"], type(defaults))
    changed = list(changes(config, run.about["config"], defaults))
    resized = Change("samples per step", old["samples per step"], new["samples per step"])
    is_resized = resized.old != resized.new
    safe = [change for change in changed if change.matches(SAFE if is_resized else (*SAFE, *_BATCH))]
    breaking = [change for change in changed if change not in safe] + ([resized] if is_resized else [])
    if breaking and not (allowed or (rank.restarted and breaking == [resized])):
        lines = "\n".join(map(str, breaking))
        if is_resized:
            processes = f"processes ({old['ranks']} then, {new['ranks']} now)"
            lines += f"\n  samples per step must stay the same: batch_size * optim.accumulate * {processes}"
        fits = "if the weights still fit the model, " * any(change.matches(["model.*"]) for change in breaking)
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
    safe += [Change(key, value, None) for key, value in gone.items()]  # keys that lost their effect: the code differs
    guarantee = resume_guarantee(saved, run, safe, breaking)
    return "\n".join(["changed since then:", *map(str, safe + breaking), guarantee]) if safe or breaking else guarantee


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
    calls = run.about["config"]["checkpoint"]["after_save"]
    reasons += [f"checkpoint.after_save {call if isinstance(call, str) else call['type']}" for call in calls]
    return reasons


def _path(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def resume_guarantee(saved: Mapping[str, Any], run: RunState, safe: list[Change], breaking: list[Change]) -> str:
    """Return the guarantee, for the log: bit-exact, sample-exact, or neither, as far as compared, and why.

    Args:
        safe, breaking: changes of the config.
    """
    old, new = saved["fingerprint"], run.fingerprint
    if run.about["config"]["dist"]["reduction"] == "fixed" and old["ranks"] != new["ranks"]:
        old = {**old, "ranks": new["ranks"]}  # any number gives the same bits
    other_val = any(change.matches(["dataset.val", "dataset.val.*"]) for change in safe)
    causes, compared = compare(old, new, other_val=other_val)
    order = causes["samples"] + [change.arrow for change in breaking]
    is_restored = new["data position restored"] and old.get("data position restored", True)
    if saved["position"]["sample"] > 0 and not is_restored:
        order.append("the dataset cannot restore its position, so the epoch is read again from its start")
    files = causes["code"] + [change.arrow for change in safe if change.key == "plugins"]
    code = [f"the code changed: {join_names(files, 10)}"] if files else []
    reasons = causes["bits"] + [change.arrow for change in safe if change.matches(_BATCH)]
    if saved.get("differing") and not run.about["config"]["dist"]["broadcast_buffers"]:
        names = join_names(saved["differing"])
        reasons.append(f"{names} differed between the processes, and the checkpoint holds rank 0's: see docs/task.md")
    if saved.get("unsaved"):
        reasons.append(f"training changed {join_names(saved['unsaved'])}, and the checkpoint does not hold it")
    extent = f"as far as compared: {compared}"
    if order:
        text = "neither bit-exact nor sample-exact: " + "; ".join(order + code + reasons)
    elif code:
        text = (
            f"not guaranteed to be bit-exact or sample-exact, since {'; '.join(code + reasons)}; state and "
            "position in the data are those of the checkpoint"
        )
    elif reasons:
        text = f"sample-exact, not bit-exact ({'; '.join(reasons)}): every sample is used once, {extent}"
        if old["ranks"] != new["ranks"]:
            text += "; the random generators of the ranks (dropout) are reseeded"
    else:
        text = f"bit-exact {extent}, if your code depends on nothing else (other files, variables)"
    lists = {"not compared": causes["missing"], "not checked": unknowns(run)}
    text += "".join(f"; {title}: {', '.join(items)}" for title, items in lists.items() if items)
    return f"this resume is {text}{_measuring_note(safe)}"


def _measuring_note(safe: list[Change]) -> str:
    keys = ", ".join(change.key for change in safe if change.matches(MEASURING))
    note = "may give different results, because its length and validation steps affect schedules and early stopping"
    return f". A fresh run with this {keys} {note}" if keys else ""
