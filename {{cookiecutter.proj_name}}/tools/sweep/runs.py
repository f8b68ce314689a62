"""The runs of a sweep: their folder; started, watched and stopped, a few at a time."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, run
from typing import Any

import torch

from common.base.errors import UserError
from common.base.process import available_cores, die_with_parent
from common.checkpoint.resume import MEASURING, SAFE, changes
from common.checkpoint.weights import weights_path
from common.config import resolve
from common.run.paths import PROJECT, RunPaths
from common.run.status import FolderLock, read_status
from tools.sweep.space import Trial
from custom.config import Config

# Settings that may change while a sweep is under way: as at a resume, but for those that decide what a new run trains.
_FREE = tuple({*SAFE} - {*MEASURING, "plugins", "init_*", "dist.processes"})
_POLL_S = 0.1


class SweepFolder:
    """The folder of a sweep, with its runs. One process at a time may use it.

    Attributes:
        command: continues the sweep; for messages.
    """

    def __init__(self, root: Path, trials: Sequence[Trial], command: str) -> None:
        """Open or create the folder, and read how far its runs are.

        Raises:
            UserError: another process uses it, it is a run's folder, or a run in it has other settings.
        """
        self.root, self.trials, self.command = root, trials, command
        if (root / "run.json").exists():
            raise UserError(f"{root} is the folder of a run; give the sweep another --name")
        for trial in trials:
            self._read(trial)
        root.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock.take(root / "sweep.lock")

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _read(self, trial: Trial) -> None:
        run = self.run(trial)
        status = read_status(run)
        if status is None:
            return
        trial.state, trial.reason = status["state"], status["reason"]
        stored = resolve(Config, [run.config_file]).values
        init = trial.config["init_from"]
        absolute = {**init, "path": weights_path(init["path"], PROJECT)}  # as a Slurm job has stored it
        if stored["init_from"] == absolute:
            stored["init_from"] = init
        changed = [str(item) for item in changes(stored, trial.config) if not item.matches(_FREE)]
        if changed:
            shown = "\n  ".join(["was trained with other settings:", *changed])
            raise UserError(f"{run.root} {shown}\ngive this sweep another --name, or use the earlier settings")

    def run(self, trial: Trial) -> RunPaths:
        """Return the paths of the run of a trial."""
        return RunPaths(self.root / trial.name)

    def say(self, trial: Trial, text: str) -> None:
        """Print a line about a trial, with its number."""
        _say(f"[{1 + self.trials.index(trial)}/{len(self.trials)}] {trial.name}: {text}".rstrip())

    def clear(self, trial: Trial) -> None:
        """Remove the folder of a run that ended before its first checkpoint: there is nothing to resume."""
        run = self.run(trial)
        if run.root.is_dir() and not any(run.checkpoints.glob("*.pt")):
            with suppress(UserError):  # in use: train.py will say so
                FolderLock.take(run.lock_file).release()
                shutil.rmtree(run.root, ignore_errors=True)

    def show(self) -> int:
        """Print the table of the runs. Returns the exit code: 1 if one did not finish."""
        run([sys.executable, "-m", "tools.runs", str(self.root)], cwd=PROJECT, check=False)
        failed = [trial for trial in self.trials if trial.state in ("failed", "stopped", "running")]
        for trial in failed:
            print(f"{trial.state}: {trial.name}: {trial.reason or 'see ' + str(self.run(trial).root)}")
        if failed:
            print(f"{len(failed)} of {len(self.trials)} runs did not finish; the same command tries them again")
        return 1 if failed else 0


class Training:
    """A running `train.py` of a trial, which it starts or resumes. What it prints goes to the file `output`.

    Args:
        words: settings of all runs.
        jobs: how many train at a time.
    """

    def __init__(self, folder: SweepFolder, trial: Trial, words: Sequence[str], jobs: int) -> None:
        folder.clear(trial)
        self.trial, self.started = trial, time.time()
        self.output = folder.root / "output" / f"{trial.name}.txt"
        self.output.parent.mkdir(exist_ok=True)
        options = [f"--name={trial.name}", f"--dir.runs_dir={folder.root}", "--resume=auto"]
        command = [sys.executable, str(PROJECT / "train.py"), *words, *trial.words, *options]
        threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // jobs))} if jobs > 1 else {}  # else one per core
        # In a session of its own: Ctrl-C reaches the sweep alone, which then stops its runs.
        alone: dict[str, Any] = {"start_new_session": True, "preexec_fn": partial(die_with_parent, os.getpid())}
        with self.output.open("wb") as file:
            self.process = Popen(command, env=threads | os.environ, stdin=DEVNULL, stdout=file, stderr=STDOUT, **alone)
        trial.state, trial.reason = "running", ""

    def end(self, folder: SweepFolder) -> None:
        """Record how the run ended, after its process has."""
        run, trial = folder.run(self.trial), self.trial
        is_new = run.status_file.exists() and run.status_file.stat().st_mtime >= self.started - 1
        status = (read_status(run) if is_new else None) or {"state": "running"}
        if status["state"] == "running":
            lines = [line.strip() for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
            trial.state, trial.reason = "failed", f"train.py ended with {self.process.returncode}: "
            trial.reason += " ".join(lines[-3:])
        else:
            trial.state, trial.reason = status["state"], status["reason"]


def run_trials(
    folder: SweepFolder,
    waiting: Sequence[Trial],
    slots: Sequence[Sequence[str]],
    words: Sequence[str],
) -> bool:
    """Train what is waiting. Returns False if Ctrl-C, SIGTERM or SIGHUP ended it.

    Args:
        slots: for each run at a time, the words that give it its devices.
    """
    queue = list(waiting)
    running: dict[int, Training] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, a lost terminal stops nothing
            signal.signal(number, signal.default_int_handler)
    try:
        while True:
            for slot in range(len(slots)):
                if queue and slot not in running:
                    trial = queue.pop(0)
                    folder.say(trial, "started")
                    running[slot] = Training(folder, trial, [*words, *slots[slot]], len(slots))
            if not running:
                return True
            time.sleep(_POLL_S)
            for slot, training in list(running.items()):
                if training.process.poll() is not None:
                    trial = running.pop(slot).trial
                    training.end(folder)
                    reason = trial.reason if trial.state != "finished" else ""
                    folder.say(trial, f"{trial.state} after {time.time() - training.started:.0f} s {reason}")
    except KeyboardInterrupt:
        for training in running.values():
            training.process.terminate()
        _say(f"\nstopping: {len(running)} run(s) save and end; Ctrl-C again ends them at once")
        with suppress(KeyboardInterrupt):
            for training in running.values():
                training.process.wait()
        for training in running.values():
            training.process.kill()
            training.process.wait()
            training.end(folder)
        _say(f"continue with:\n  {folder.command}")
        return False
    finally:
        for training in running.values():
            training.process.kill()


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal or the reader of a pipe is gone; the runs must still be stopped and saved
        print(text, flush=True)


def devices(gpu_ids: Any, jobs: int) -> list[list[str]]:
    """For each of `jobs` runs at a time, the words that give it its share of the GPUs; all shares are equal."""
    gpus = list(range(torch.accelerator.device_count())) if gpu_ids == "all" else gpu_ids
    gpus = [gpus] if isinstance(gpus, int) else gpus
    if jobs == 1 or not isinstance(gpus, list) or not gpus or gpus == [-1]:
        return [[] for _ in range(jobs)]
    per_job = max(len(gpus) // jobs, 1)  # with unequal shares, the runs would differ in their global batch
    shares = [[gpus[(slot + turn * jobs) % len(gpus)] for turn in range(per_job)] for slot in range(jobs)]
    return [[f"--gpu_ids={','.join(map(str, share))}"] for share in shares]
