"""Inside a Slurm job, around the training: python -m common.slurm.requeue before RUN CONFIG | after RUN EXIT_CODE

`before` says on stdout how to start: `finished` when there is nothing left to do, else options for train.py. `after`
queues the job again when training was stopped only to be continued, and ends with the exit code that the job deserves.
Both run in the job script, on the job's first node, and need neither PyTorch nor the configuration.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.run.paths import RunPaths
from common.run.status import write_status

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, the run continues when it is started again
MAX_IDLE_RESTARTS = 3  # in a row without a newer checkpoint; the next would not get further either
_REQUEUE_SIGNALS = ("SIGUSR1", "SIGUSR2")
_KILLED_BY_THEM = (128 + 10, 128 + 12)  # the signal came before Python could handle it
_TERMINATED = 128 + 15
_RETRY_AFTER_S = (2.0, 10.0)  # a busy controller refuses, and answers a little later
_REQUEST_TIMEOUT_S = 60.0


def before(run: Path, config: Path) -> str:
    """How to start a run that may have been started before.

    Args:
        config: written at submission, so whatever is newer was made by this very job.

    Returns:
        "finished", or options for train.py.

    Raises:
        SystemExit: the job is requeued again and again without getting anywhere.
    """
    status = _read(run / "status.json", since=config)
    if status.get("state") == "finished":
        _say(f"this run finished at step {status.get('step')} already; there is nothing left to do")
        return "finished"
    saved = max((path.stat().st_mtime_ns for path in run.glob("checkpoints/*.pt")), default=0)
    _check_progress(run, saved)
    # The config may say where to begin (`resume`, `start_epoch: 0`). That holds until the job has saved for itself.
    return "--resume auto --progress.start_epoch -1" if saved >= config.stat().st_mtime_ns else ""


def _check_progress(run: Path, saved: int) -> None:
    """Note this start beside the others of this job, and stop when the last ones have all saved nothing."""
    file = _starts(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    start = json.dumps({"job": job_id(), "saved": saved})
    last = file.read_text().splitlines()[-MAX_IDLE_RESTARTS:] if file.exists() else []
    with file.open("a") as lines:
        lines.write(start + "\n")
    if last != [start] * MAX_IDLE_RESTARTS:
        return
    reason = f"job {job_id()} was queued again {MAX_IDLE_RESTARTS} times without saving a newer checkpoint"
    _say(f"{reason}: it is stopped here; see above why, then submit it again with --resume auto")
    _write_failed(run, reason)
    raise SystemExit(1)


def after(run: Path, code: int) -> int:
    """Queue the job again if training is to continue. Returns the exit code of the job.

    Args:
        code: of srun. It may be that of any process, or of one that srun itself has killed because another had ended:
            what counts is `status.json`, which the main process writes before any process ends.
    """
    status = _read(run / "status.json", since=_starts(run))
    state, reason = status.get("state"), status.get("reason")
    if state == "finished":
        if code:
            _say(f"training has finished, although a process ended with {code} on its way out")
        return 0
    if state == "failed":
        return code or 1
    if reason in _REQUEUE_SIGNALS or code in _KILLED_BY_THEM:
        return _requeue(f"stopped by {reason or 'a signal before it could start'}")
    if (reason == "SIGTERM" or code == _TERMINATED) and is_preempted(job_id()):
        return _requeue("stopped to make room for another job")
    if code and state != "stopped":
        _write_failed(run, f"the processes ended with {code}")
    return code


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """What `scontrol` calls this job: an array's task by the array's id, since the plain one means all of them."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def is_preempted(job: str) -> bool:
    """Whether Slurm takes the job's place away. It requeues such a job itself only if it has to kill it."""
    done = _scontrol("-o", "show", "job", job)
    return done is not None and "PreemptTime=2" in done.stdout  # a date; otherwise None


def _requeue(why: str) -> int:
    job = job_id()
    for pause in (*_RETRY_AFTER_S, None):
        done = _scontrol("requeue", job)
        if done is not None and done.returncode == 0:
            _say(f"{why}; job {job} is queued again and continues from there")
            return EXIT_REQUEUE
        if done is None or pause is None:
            break
        time.sleep(pause)
    trouble = "there is no scontrol here" if done is None else done.stderr.strip() or f"it ended with {done.returncode}"
    _say(
        f"{why}, and everything is saved, but job {job} could not be queued again: {trouble}\n"
        "  continue with:  sh scripts/slurm.sh ... --resume auto"
    )
    return EXIT_REQUEUE


def _scontrol(*words: str) -> subprocess.CompletedProcess[str] | None:
    """None when it is not installed, or does not answer."""
    try:
        return subprocess.run(
            ["scontrol", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_REQUEST_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _starts(run: Path) -> Path:
    """A line for each start: the job, and when its newest checkpoint was written (ns). Written before training."""
    return run / "slurm" / "starts.jsonl"


def _read(file: Path, since: Path) -> dict[str, Any]:
    """A run's status; nothing when it was written before the file `since`, by an earlier start."""
    try:
        if file.stat().st_mtime_ns < since.stat().st_mtime_ns:
            return {}
        status: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return status


def _write_failed(run: Path, reason: str) -> None:
    step = _read(run / "status.json", since=_starts(run)).get("step")
    write_status(RunPaths(run), "failed", step=step, reason=reason)


def _say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    """The command line. Returns the exit code."""
    match words:
        case ["before", run, config]:
            print(before(Path(run), Path(config)))
            return 0
        case ["after", run, code]:
            return after(Path(run), int(code))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
