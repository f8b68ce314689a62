"""Inside a Slurm job, around the training: python -m tools.slurm.requeue before RUN STARTS | after CODE RUN STARTS

`before` prints `finished` when this job has trained to the end already. `after` queues the job again when training was
stopped only to be continued, and ends with the exit code that the job deserves; what starts again continues by itself.
STARTS is a file of the job, with a line for each of its starts. Both run in the job script, on the job's first node,
and need neither PyTorch nor the configuration.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.base.process import EXIT_REQUEUE
from common.run.paths import RunPaths
from common.run.status import read_status, write_status

MAX_IDLE_RESTARTS = 3  # in a row without a newer checkpoint; another would get no further
# Exit codes of processes that a signal killed before Python could handle it.
_KILLED_BY = {128 + 10: "SIGUSR1", 128 + 12: "SIGUSR2", 128 + 15: "SIGTERM"}
_PAUSES_S = (0.0, 2.0, 10.0)  # before each attempt: a busy controller may refuse at first
_REQUEST_TIMEOUT_S = 60.0


def before(run: Path, starts: Path) -> bool:
    """Record this start of the job. Returns whether the run has already finished.

    Raises:
        SystemExit: the job was requeued `MAX_IDLE_RESTARTS` times without progress.
    """
    status = _read_status(run, since=starts)
    if status.get("state") == "finished":
        _say(f"this run finished at step {status.get('step')} already; there is nothing left to do")
        return True
    saved = max((path.stat().st_mtime_ns for path in run.glob("checkpoints/*.pt")), default=0)
    start = json.dumps({"job": job_id(), "saved": saved})
    with starts.open("a") as lines:
        lines.write(start + "\n")
    alike = MAX_IDLE_RESTARTS + 1
    if starts.read_text().splitlines()[-alike:] == [start] * alike:
        raise SystemExit(
            f"slurm: job {job_id()} was queued again {MAX_IDLE_RESTARTS} times without saving a newer checkpoint: it is"
            " stopped here; see above why, then submit it again with --resume auto"
        )
    return False


def after(code: int, run: Path, starts: Path) -> int:
    """Requeue the job if training should continue. Returns the exit code of the job.

    Args:
        code: exit code of srun. It may be that of any process, even one that srun killed because another had ended;
            `status.json` decides, which the main process writes before any process ends.
    """
    status = _read_status(run, since=starts)
    state, reason = status.get("state"), status.get("reason", "")
    if state == "finished":
        if code:
            _say(f"training has finished, although a process ended with {code} on its way out")
        return 0
    if state == "failed":
        code = code or 1
    else:
        reason = reason or _KILLED_BY.get(code, "")
    if "SIGUSR" in reason:
        return _requeue(f"stopped by {reason}")
    if "SIGTERM" in reason and is_preempted(job_id()):
        return _requeue("stopped to make room for another job")
    if code and state == "running":
        write_status(RunPaths(run), "failed", step=status["step"], reason=f"the processes ended with {code}")
    return code


def job_id() -> str:
    """This job's id for `scontrol`; for a task of an array, `<array>_<task>`, since a plain id may mean all tasks."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def is_preempted(job: str) -> bool:
    """Return whether Slurm is preempting the job. It requeues such a job itself only if it has to kill it."""
    return "PreemptTime=2" in _scontrol("-o", "show", "job", job)[1]  # a date, or else None


def _requeue(why: str) -> int:
    job = job_id()
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        is_queued, answer = _scontrol("requeue", job)
        if is_queued:
            _say(f"{why}; job {job} is queued again and continues from there")
            return EXIT_REQUEUE
    _say(f"{why}, but job {job} could not be queued again: {answer}")
    _say("continue with:  sh scripts/slurm.sh ... --resume auto")
    return EXIT_REQUEUE


def _scontrol(*words: str) -> tuple[bool, str]:
    """Run `scontrol`. Returns whether it succeeded, and its output."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=_REQUEST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def _read_status(run: Path, since: Path) -> dict[str, Any]:
    """Read the run's current status; {} if it was written before the file `since`, by another start or run."""
    paths = RunPaths(run)
    with suppress(FileNotFoundError):
        if paths.status_file.stat().st_mtime_ns >= since.stat().st_mtime_ns:
            return read_status(paths) or {}
    return {}


def _say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    """Run the command line. Return the exit code."""
    match words:
        case ["before", run, starts]:
            print("finished" if before(Path(run), Path(starts)) else "")
            return 0
        case ["after", code, run, starts]:
            return after(int(code), Path(run), Path(starts))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
