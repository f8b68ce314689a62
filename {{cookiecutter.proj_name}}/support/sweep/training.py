"""The training processes of a sweep: started, watched and stopped, a few at a time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.base.process import available_cores, die_with_parent
from common.run.paths import PROJECT
from common.run.status import read_status
from support.sweep.folder import SweepFolder
from support.sweep.space import Trial

_POLL_S = 0.1


@dataclass
class Training:
    """A running `train.py` of a trial. What it prints goes to the file `output`."""

    trial: Trial
    process: subprocess.Popen[bytes]
    output: Path
    started: float = field(default_factory=time.time)

    @classmethod
    def start(cls, folder: SweepFolder, trial: Trial, words: Sequence[str], jobs: int) -> "Training":
        """Start or resume the run of a trial."""
        folder.clear(trial)
        output = folder.root / "output" / f"{trial.name}.txt"
        output.parent.mkdir(exist_ok=True)
        place = [f"--name={trial.name}", f"--dir.expr_dir={folder.root}", "--resume=auto"]
        environment = dict(os.environ)
        if jobs > 1:  # else each would start a thread per core
            environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // jobs)))
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(PROJECT / "train.py"), *words, *trial.words, *place],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        trial.state, trial.reason = "running", ""
        return cls(trial, process, output)

    def end(self, folder: SweepFolder) -> None:
        """Record how the run ended, after its process has."""
        file = folder.run(self.trial).status_file
        is_new = file.exists() and file.stat().st_mtime >= self.started - 1
        status = read_status(folder.run(self.trial)) if is_new else None
        if self.trial.state == "pruned" and status is not None and status["state"] == "stopped":
            return
        if status is not None and status["state"] != "running":
            self.trial.state, self.trial.reason = status["state"], status["reason"]
        else:
            lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
            self.trial.state = "failed"
            last = " ".join(line.strip() for line in lines[-3:])
            self.trial.reason = f"train.py ended with {self.process.returncode}: {last}"


def run_trials(
    folder: SweepFolder,
    take: Callable[[], Trial | None],
    slots: Sequence[Sequence[str]],
    words: Sequence[str],
    *,
    watch: Callable[[Training], None] = lambda training: None,
    ended: Callable[[Training], None] = lambda training: None,
) -> bool:
    """Train until `take` gives no more trials. Returns False if Ctrl-C, SIGTERM or SIGHUP ended it.

    Args:
        take: the next trial; called when a slot is free.
        slots: for each run at a time, the words that give it its devices.
        watch: called ten times a second for each running trial.
        ended: called when one has ended.
    """
    running: dict[int, Training] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        while True:
            for slot in [slot for slot in range(len(slots)) if slot not in running]:
                if (trial := take()) is not None:
                    print(f"{_number(folder, trial)} {trial.name}: started", flush=True)
                    running[slot] = Training.start(folder, trial, [*words, *slots[slot]], len(slots))
                    folder.write()
            if not running:
                return True
            time.sleep(_POLL_S)
            for slot, training in list(running.items()):
                watch(training)
                if training.process.poll() is not None:
                    _end(folder, running.pop(slot), ended)
    except KeyboardInterrupt:
        _stop(folder, list(running.values()))
        return False
    except BaseException:
        for training in running.values():
            training.process.kill()
        raise


def _number(folder: SweepFolder, trial: Trial) -> str:
    return f"[{1 + [each.name for each in folder.trials].index(trial.name)}/{folder.total or len(folder.trials)}]"


def _end(folder: SweepFolder, training: Training, ended: Callable[[Training], None]) -> None:
    training.end(folder)
    ended(training)
    folder.write()
    trial, seconds = training.trial, time.time() - training.started
    reason = trial.reason if trial.state not in ("finished", "pruned") else ""
    print(f"{_number(folder, trial)} {trial.name}: {trial.state} after {seconds:.0f} s {reason}".rstrip(), flush=True)


def _stop(folder: SweepFolder, running: Sequence[Training]) -> None:
    """Let the runs save and end; Ctrl-C again ends them at once."""
    print(f"\nstopping: {len(running)} run(s) save and end; Ctrl-C again ends them at once", flush=True)
    for training in running:
        training.process.terminate()
    try:
        for training in running:
            training.process.wait()
    except KeyboardInterrupt:
        for training in running:
            training.process.kill()
            training.process.wait()
    for training in running:
        training.end(folder)
    folder.write()
    print(f"continue with:\n  {folder.command}", flush=True)


def devices(gpu_ids: Any, jobs: int) -> list[list[str]]:
    """For each of `jobs` runs at a time, the words that give it its share of the GPUs; all shares are equal."""
    gpus = list(range(torch.cuda.device_count())) if gpu_ids == "all" else gpu_ids
    gpus = [gpus] if isinstance(gpus, int) else gpus
    if jobs == 1 or not isinstance(gpus, list) or not gpus or gpus == [-1]:
        return [[] for _ in range(jobs)]
    each = max(len(gpus) // jobs, 1)  # with unequal shares, the runs would differ in their global batch
    shares = [[gpus[(slot + turn * jobs) % len(gpus)] for turn in range(each)] for slot in range(jobs)]
    return [[f"--gpu_ids={','.join(map(str, share))}"] for share in shares]
