"""Replay a run and certify its bits: python -m tools.verify RUN [--from start|CHECKPOINT] [--anyway]

Before it trains anything it compares what decides the bits: the code, the packages and the data. What has changed is
named, and refused. Then it trains from one checkpoint to the newest one, in a temporary folder, and compares the
weights at each save, every measurement, and all that the newest checkpoint holds. RUN/certificate.json says what was
compared and what was equal. Exit code 0: verified; 1: something differs; 2: refused, or nothing can be replayed.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.base.files import PROJECT, output_file, write_text
from common.base.process import die_with_parent
from common.build import build_parts
from common.checkpoint.checksum import weights_digest
from common.checkpoint.file import CheckpointError, read_checkpoint
from common.checkpoint.fingerprint import changes, fingerprint
from common.checkpoint.guarantee import MEASURING, SAFE
from common.config import dump, resolve
from common.config.layers import node_of
from common.config.names import join_names
from common.data.contents import changed, read_contents
from common.data.digest import differences, search
from common.distributed.process import set_up_process
from common.failure.program import report_errors
from common.monitor.log import setup_log
from common.run.environment import installed
from common.run.lock import is_held
from common.run.metrics import read_metrics
from common.run.paths import RunPaths
from common.run.record import RESULT_VARIABLES, read_attempts
from common.run.status import now
from cli.trained import find_device
from custom.config import Config
from tools.same import equal, explain, leaves

_STOPPED = 143  # the exit code of a run that SIGTERM has stopped: the replay, at the last step of the segment
_EVALUATED = ("owed", "values", "best", "schedule", "stages")  # entries that an evaluation changes
_SHOWN = 5  # tensors that differ
_LAST_LINES = 15  # of the output of a replay that failed
VERIFIED, DIFFERS, REFUSED = 0, 1, 2


@dataclass
class Run:
    """A run as it lies on the disk.

    Attributes:
        rows: the lines of metrics.jsonl.
        recorded: digest of the weights at each save, by step; none of an earlier version.
        kept: the intact checkpoints by step, with the digest of what they hold.
        damaged: the others, with the reason.
        begins: the step at which each attempt began.
    """

    paths: RunPaths
    attempts: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    recorded: dict[int, str]
    begins: list[int]
    kept: dict[int, tuple[Path, str]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Segment:
    """The part of a run that is replayed.

    Attributes:
        start: the checkpoint that it begins with; None: the beginning of the run.
        end, state: the checkpoint that it leads to, and what it holds.
        attempts: the numbers of the attempts that trained it, from 0.
        mixed: what changed between them, so that no single replay can repeat it.
    """

    start: Path | None
    first: int
    end: Path
    last: int
    state: dict[str, Any]
    attempts: list[int]
    mixed: list[str]


def main(argv: list[str]) -> int:
    """Replay the run of the command line, write its certificate, and return the exit code."""
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=rest)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--from", dest="start", metavar="START", help="start, or a checkpoint; the oldest one by default")
    parser.add_argument("--anyway", action="store_true", help="replay changed code, packages or data, to see how far apart")
    options = parser.parse_args(argv)
    setup_log("ERROR")
    run = read_run(RunPaths(options.run.expanduser().resolve()))
    segment = choose_segment(run, options.start)
    found: dict[str, Any] = {"format": 1, "run": run.paths.name, "date": now()}
    found["command"] = shlex.join(["python", "-m", "tools.verify", *argv])
    found["segment"] = {"from": segment.start.name if segment.start else "start", "from_step": segment.first}
    found["segment"] |= {"to": segment.end.name, "to_step": segment.last}
    found["checkpoints"] = [
        {"file": file.name, "step": step, "weights": weights, "recorded": run.recorded.get(step)}
        for step, (file, weights) in sorted(run.kept.items())
    ]
    found["damaged"] = run.damaged
    code = _certify(run, segment, found, anyway=options.anyway)
    found |= {"verdict": ("verified", "differs", "refused")[code], "exit": code}
    with output_file(run.paths.certificate_file):
        write_text(run.paths.certificate_file, json.dumps(found, indent=2) + "\n")
    print(f"wrote {run.paths.certificate_file}")
    return code


def _certify(run: Run, segment: Segment, found: dict[str, Any], *, anyway: bool) -> int:
    """Compare what decides the bits, replay, and compare the bits; note all of it in `found`."""
    foreign = [each for each in found["checkpoints"] if each["recorded"] not in (None, each["weights"])]
    if foreign:
        names = join_names([each["file"] for each in foreign])
        print(f"differs: the weights in {names} are not those that metrics.jsonl recorded when they were saved")
        return DIFFERS
    values = replay_values(run, segment)
    evidence = compare_evidence(run, segment, values)
    evidence["changed"] = segment.mixed + evidence["changed"]
    found |= evidence
    for title, texts in (("another machine", evidence["machine"]), ("not compared", evidence["not_compared"])):
        print("\n".join([f"{title}:", *(f"  {text}" for text in texts)]) if texts else "", end="\n" if texts else "")
    if evidence["changed"]:
        title = "changed since the run" if anyway else "refused, since this has changed since the run"
        print("\n".join([f"{title}:", *(f"  {text}" for text in evidence["changed"])]))
        if not anyway:
            print("undo it, or see how far apart the results are: --anyway")
            return REFUSED
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        replayed = replay(run, segment, values, Path(folder))
        compared, different = compare_bits(run, segment, replayed)
    found |= {"compared": compared, "different": different}
    what = ", ".join(f"{count} {name}" for name, count in compared.items() if count)
    span = f"from {found['segment']['from']} (step {segment.first}) to step {segment.last}"
    if not different:
        print(f"verified: {what}, {span}, are equal to the last bit")
        return VERIFIED
    print("\n".join([f"differs: compared {what}, {span}; A is the run, B its replay", *map(_line, different)]))
    return DIFFERS


def _line(different: Mapping[str, Any]) -> str:
    return f"  {different['what']}"


def read_run(paths: RunPaths) -> Run:
    """Read a run and all its checkpoints. Raises `UserError` if there is nothing to verify, or it is still training."""
    if not (attempts := read_attempts(paths)) or not paths.metrics_file.is_file():
        raise UserError(f"{paths.root} is no folder of a run: it needs run.json and metrics.jsonl, as in experiments/x")
    if is_held(paths.lock_file):
        raise UserError(f"{paths.root} is in use by {paths.lock_file.read_text()}; verify it when that has ended")
    rows = read_metrics(paths.metrics_file)
    recorded = {row["step"]: row["weights"] for row in rows if row["event"] == "checkpoint" and "weights" in row}
    begins = {row["attempt"]: row["resume_step"] or 0 for row in rows if row["event"] == "run"}
    run = Run(paths, attempts, rows, recorded, [begins.get(number + 1, 0) for number in range(len(attempts))])
    read: set[tuple[int, int]] = set()
    # Numbered files first: latest.pt is another name of one.
    for file in sorted(paths.checkpoints.glob("*.pt"), key=lambda file: (not file.name.startswith("step_"), file.name)):
        about = file.stat()
        if file.name.startswith("abandoned") or (about.st_dev, about.st_ino) in read:
            continue
        read.add((about.st_dev, about.st_ino))
        try:
            state = read_checkpoint(file)
        except CheckpointError as error:
            run.damaged.append(str(error))
            print(f"left out: {error}")
            continue
        run.kept.setdefault(state["position"]["step"], (file, weights_digest(state)))
    if not run.kept:
        raise UserError(f"{paths.checkpoints} has no intact checkpoint to replay to")
    return run


def choose_segment(run: Run, start: str | None) -> Segment:
    """Choose what to replay: to the newest checkpoint, from the oldest one since which nothing was changed.

    Args:
        start: "start", or a checkpoint, by its path or its name in the run; None: as above.

    Raises:
        UserError: there is no such checkpoint, or it is the newest one.
    """
    last = max(run.kept)
    state = read_checkpoint(run.kept[last][0])
    if start == "start":
        return _segment(run, state, None, 0)
    if start is not None:
        near = run.paths.checkpoints / start
        file = near if near.is_file() else Path(start).expanduser()
        first = int(read_checkpoint(file)["position"]["step"])
        if first >= last:
            raise UserError(f"--from {start}: it is at step {first}, and the newest checkpoint at {last}; name an older one")
        return _segment(run, state, file.resolve(), first)
    older: list[tuple[int, Path | None]] = [(step, run.kept[step][0]) for step in sorted(run.kept) if step < last]
    segments = [_segment(run, state, file, step) for step, file in older or [(0, None)]]
    return next((each for each in segments if not each.mixed), segments[-1])


def _segment(run: Run, state: dict[str, Any], start: Path | None, first: int) -> Segment:
    last = state["position"]["step"]
    following = [*run.begins[1:], last + 1]
    numbers = [n for n, (begin, end) in enumerate(zip(run.begins, following, strict=True)) if begin < last and end > first]
    attempts = [run.attempts[number] for number in numbers]
    mixed: list[str] = []
    for attempt in attempts[:-1]:
        before, after = (_decisive(run, each) for each in (attempt, attempts[-1]))
        mixed += [f"at a resume: {change.arrow}" for change in changes(before, after)]
    for step, (file, _) in run.kept.items():
        if first < step < last:
            prints = [each["fingerprint"] for each in (read_checkpoint(file), state)]
            old, new = ({"code": each.get("code", {}), "data": each.get("data", {})} for each in prints)
            mixed += [f"after step {step}: {change.key}" for change in changes(old, new)]
    return Segment(start, first, run.kept[last][0], last, state, numbers or [len(run.attempts) - 1], sorted(set(mixed)))


def _decisive(run: Run, attempt: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the bits of an attempt, as far as run.json and its config tell."""
    values = resolve(Config, [run.paths.root / attempt["config"]]).values
    ignored = [key for key in SAFE if key not in MEASURING and key != "plugins"]
    kept = {change.key: str(change.old) for change in changes(values, {}) if not change.matches(ignored)}
    return {"config": kept, **{name: attempt[name] for name in ("packages", "machine", "world_size")}}


def replay_values(run: Run, segment: Segment) -> dict[str, Any]:
    """The config of the replay: the run's own, from `segment.start`, with as many processes, in a folder to be named.

    Raises:
        UserError: this machine has some of the GPUs, but too few.
    """
    if segment.start is None:
        values = resolve(Config, [run.paths.root / run.attempts[0]["config"]]).values
        if values["resume"] == "auto" or run.paths.contains(values["resume"]):
            values["resume"] = None
    else:
        stored = node_of(dict(segment.state["about"]["config"]), f"the config in {segment.end}")
        values = resolve(Config, [], stored=stored).values
        values |= {"resume": str(segment.start), "allow_changes": True}
        values["progress"]["start_epoch"] = -1
    ranks, device = segment.state["fingerprint"]["ranks"], segment.state["fingerprint"].get("device", "cpu")
    values["dist"] |= {"random_seed": segment.state["about"]["seed"], "launcher": "auto", "processes": None}
    gpus = torch.cuda.device_count()
    if device.startswith("cpu") or (values["gpu_ids"] != "mps" and not gpus):
        values["gpu_ids"] = -1
        values["dist"]["processes"] = ranks if ranks > 1 else None
    elif 0 < gpus < ranks:
        raise UserError(f"the run used {ranks} GPUs, and this machine has {gpus}: verify it on one that has {ranks}")
    elif ranks > 1:
        values["gpu_ids"] = list(range(ranks))
    values["plugins"] = [*values["plugins"], "tools.verify.stop_at_end"]
    values["monitor"] |= {"writers": [], "bar": "off"}
    values["name"] = "replay"
    return values


def compare_evidence(run: Run, segment: Segment, values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Compare what decides the bits with what the newest checkpoint recorded of it.

    Returns:
        `changed`: code, packages and data, which refuse; `machine`: what differs of it, which does not; `not_compared`.
    """
    attempt, old = run.attempts[segment.attempts[-1]], segment.state["fingerprint"]
    os.environ.update(attempt["environment"])
    config = resolve(Config, [], stored=node_of(dict(values), "the config of the replay")).config
    rank = find_device(config.gpu_ids, asked=False)
    set_up_process(config.dist, rank)
    torch.set_num_threads(attempt["cpu_threads"])
    parts = build_parts(config, rank, segment.state["about"]["seed"])
    new = fingerprint(rank, parts.stream, segment.state["about"]["seed"], "", parts.deciding_data())
    commit = attempt["git"]["commit"]
    said, machine, missing = [], [], [] if "code" in old else ["code (the run does not record it)"]
    for change in changes(old.get("code", {}), new["code"]) if "code" in old else ():
        kind = " (new)" if change.old is None else " (gone)" if change.new is None else ""
        hint = f"; see git diff {commit[:12]} -- {change.key}" if commit and not kind else ""
        said.append(f"code: {change.key}{kind}{hint}")
    packages = {name: installed(name) or "not installed" for name in old.get("packages", {})}
    for change in changes(old.get("packages", {}), packages):
        said.append(f"package {change.arrow}")
    like_packages = ("torch", "numpy", "python", "libraries")
    others = [key for key in (*like_packages, *attempt["machine"], "environment") if key in old and key in new]
    for change in changes({key: old[key] for key in others}, {key: new[key] for key in others}):
        (said if change.key in like_packages else machine).append(
            f"package {change.arrow}" if change.key in like_packages else change.arrow
        )
    if not old.get("device", "cpu").startswith("cpu") and not old.get("deterministic"):
        machine.append("a GPU without dist.deterministic strict: its results may differ in each run")
    other, unread = compare_data(run, parts.deciding_data(), old.get("data", {}), new["data"])
    unknown = [f"dataset.{name}: {text}" for name, each in new["data"].items() for text in each["unknown"]]
    return {"changed": said + other, "machine": machine, "not_compared": missing + unread + unknown}


def compare_data(
    run: Run, datasets: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare the data sets with the run's record. Returns what changed, by name, and what was not compared in full."""
    said, unread = [], []
    stored = read_contents(run.paths.contents_file) if run.paths.contents_file.is_file() else None
    for name, dataset in datasets.items():
        if name not in old:
            unread.append(f"dataset.{name} (the run does not record it)")
            continue
        named, rest = changed(stored, name, search(dataset)) if stored and f"{name}/names" in stored else ([], "")
        other, times = differences(name, old[name], new[name])
        if stored is None and old[name]["files"]:
            rest = f"dataset.{name}: the contents of {old[name]['files']} files (the run does not record them)"
        said += named or ([other] if other else [times] if times and stored is None else [])
        unread += [rest] if rest else []
    return said, unread


def replay(run: Run, segment: Segment, values: Mapping[str, Any], folder: Path) -> RunPaths:
    """Train the segment again in `folder`. Raises `UserError` with the last lines of its output if that fails."""
    attempt = run.attempts[segment.attempts[-1]]
    (folder / "config.yaml").write_text(dump({**values, "dir": {**values["dir"], "runs_dir": str(folder)}}))
    program = Path(attempt["argv"][0]).name
    program = program if (PROJECT / program).is_file() else "train.py"
    speeds = [row["values"]["step_seconds"] for row in run.rows if row["event"] == "speed"]
    seconds = (segment.last - segment.first) * statistics.median(speeds) if speeds else 0
    about = f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s" if speeds else "unknown time"
    ranks = segment.state["fingerprint"]["ranks"]
    start = f"{segment.start.name} (step {segment.first})" if segment.start else "the start"
    print(
        f"replaying {segment.last - segment.first} steps, from {start} to {segment.end.name} (step {segment.last}), with "
        f"{ranks} process{'es' * (ranks > 1)}: {about} by the run's speed, and its evaluations; log: {folder}/replay/train.log",
        flush=True,
    )
    variables = {name: value for name, value in os.environ.items() if name not in RESULT_VARIABLES}
    variables |= {**attempt["environment"], "OMP_NUM_THREADS": str(attempt["cpu_threads"])}
    variables |= {"VERIFY_SAVES": ",".join(map(str, sorted({*run.recorded, segment.last})))}
    place = Path(attempt["working_directory"])
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(PROJECT / program), "--config", str(folder / "config.yaml")],
            cwd=place if place.is_dir() else PROJECT, env=variables, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code not in (0, _STOPPED):
        lines = (folder / "output.txt").read_text(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
        raise UserError("\n  ".join([f"the replay ended with exit code {code}:", *lines]))
    print(f"replayed in {time.monotonic() - began:.0f} s", flush=True)
    return RunPaths(folder / "replay")


def stop_at_end(trainer: Any) -> None:
    """Save at the steps in VERIFY_SAVES, and stop after the last of them. A plugin of the replay."""
    saves = {int(step) for step in os.environ["VERIFY_SAVES"].split(",")}
    sync = trainer.stop_signals.sync

    def decide(save: bool) -> Any:
        decision = sync(save)
        if (step := trainer.at.step) not in saves:
            return decision
        return decision._replace(save=True, stop=_STOPPED - 128 if step == max(saves) else decision.stop)

    trainer.stop_signals.sync = decide  # called after the evaluations of a step, on every process


def compare_bits(run: Run, segment: Segment, replayed: RunPaths) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Compare the replay with the run. Returns how much was compared, and what differs, in the order of its steps."""
    rows = read_metrics(replayed.metrics_file)
    saves = {row["step"]: row["weights"] for row in rows if row["event"] == "checkpoint"}
    steps = sorted(step for step in saves.keys() & run.recorded.keys() if segment.first < step <= segment.last)
    different = [
        {"what": f"the weights of the save at step {step}", "kind": "save", "step": step}
        for step in [step for step in steps if saves[step] != run.recorded[step]][:1]
    ]
    first = segment.first if segment.start else -1
    ours, theirs = (_measured(each, first, segment.last) for each in (run.rows, rows))
    if segment.state["owed"]:  # a signal interrupted the evaluations of the last step
        ours, theirs = ({key: each[key] for key in each if key[0] < segment.last} for each in (ours, theirs))
    keys = sorted({*ours, *theirs})
    for step, event, name in [key for key in keys if not equal(ours.get(key), theirs.get(key))][:1]:
        gap = explain(ours.get((step, event, name)), theirs.get((step, event, name)))
        different.append({"what": f"the {event} row of step {step}: {name}: {gap}", "kind": "row", "step": step})
    different.sort(key=lambda each: each["step"])
    before, after = (dict(leaves(each)) for each in (segment.state, read_checkpoint(replayed.checkpoints / "latest.pt")))
    names = list(dict.fromkeys([*before, *after]))
    if segment.state["owed"]:
        names = [name for name in names if name.partition(".")[0] not in _EVALUATED]
    bad = [name for name in names if not equal(before.get(name), after.get(name))]
    for name in bad[:_SHOWN]:
        a, b = before.get(name), after.get(name)
        text = f"{name} at step {segment.last}: {explain(a, b)}{_relative(a, b)}"
        different.append({"what": text, "kind": "entry", "step": segment.last})
    if len(bad) > _SHOWN:
        more = f"and {len(bad) - _SHOWN} more of {len(names)} entries at step {segment.last}"
        apart = [distance(before.get(name), after.get(name)) for name in bad]
        more += f"; tensors are up to {max(apart):.2g} apart, relative to their largest number"
        different.append({"what": more, "kind": "entries", "step": segment.last})
    tensors = sum(isinstance(before.get(name), Tensor) for name in names)
    counts = {"saves": len(steps), "rows": len({key[:2] for key in keys}), "measurements": len(keys)}
    return {**counts, "tensors": tensors, "other entries": len(names) - tensors}, different


def _measured(rows: Sequence[Mapping[str, Any]], first: int, last: int) -> dict[tuple[int, str, str], float]:
    found = [row for row in rows if row["event"] != "speed" and first < row["step"] <= last]
    return {(row["step"], row["event"], name): value for row in found for name, value in row["values"].items()}


def distance(a: Any, b: Any) -> float:
    """The largest difference of two tensors, relative to the largest number of `a`; 0 for anything else."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.is_floating_point()):
        return 0.0
    return ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-300)).item()


def _relative(a: Any, b: Any) -> str:
    return f" ({apart:.2g} of the largest)" if (apart := distance(a, b)) else ""


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
