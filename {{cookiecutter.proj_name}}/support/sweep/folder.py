"""The folder of a sweep: its runs, its record, and the config of each trial."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.files import write_text
from common.checkpoint.fingerprint import changes
from common.config import ConfigError, Problem, Resolved, option_value
from common.config.registry import REGISTRIES
from common.run.lock import FolderLock
from common.run.paths import PROJECT, RunPaths
from common.run.status import read_status
from cli.command_line import parse
from support.sweep.space import SPEC, Trial
from custom.config import Config

FILE = "sweep.json"
# Settings that may change while a sweep is under way: its runs stay comparable.
_FREE = (
    "name", "allow_changes", "gpu_ids", "worker", "dir.*", "monitor.*", "profile.*", "checkpoint.*", "dist.timeout",
    "dist.launcher", "loader.pin_memory", "loader.prefetch", "loader.persistent", "loader.timeout",
    "loader.start_method",
)  # fmt: skip


def config_of(config: str, words: Sequence[str]) -> Resolved[Config]:
    """What train.py would read from these words. Raises `ConfigError`."""
    overlay = PROJECT / "configs" / "debug.yaml"
    return parse(Config, ["--config", config, *words], prog="tools.sweep", registries=REGISTRIES, debug_overlay=overlay)


def check_trials(config: str, words: Sequence[str], trials: Sequence[Trial]) -> None:
    """Read the config of every trial. Raises `ConfigError` with the problems of all of them, each once."""
    for key in trials[0].values:
        if (value := option_value(words, f"--{key}")) is not None:
            raise UserError(f"{key} is among the values to try, and also set for all runs (--{key} {value}); keep one")
    problems: dict[str, Problem] = {}
    for trial in trials:
        try:
            config_of(config, [*words, *trial.words, f"--name={trial.name}", "--resume=auto"])
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError(list(problems.values()))


class SweepFolder:
    """The folder of a sweep: its runs, and `sweep.json` with the space, the config, and the state of each trial.

    One process at a time may use it.

    Attributes:
        command: continues the sweep; for messages.
        total: the number of trials that there will be; 0: those in `trials`.
    """

    total = 0

    def __init__(self, root: Path, space: Mapping[str, Any], base: Mapping[str, Any], command: str) -> None:
        """Open or create the folder.

        Args:
            space: what is tried, as plain data.
            base: the config without the values to try.

        Raises:
            UserError: another process uses it, it is a run's folder, or belongs to another space or config.
        """
        self.root, self.command = root, command
        if (root / "run.json").exists():
            raise UserError(f"{root} is the folder of a run; give the sweep another --name")
        self._about = {"space": json.loads(json.dumps(space)), "config": dict(base)}
        self.trials: list[Trial] = []
        if (root / FILE).exists():
            stored = json.loads((root / FILE).read_text())
            self._check_same(stored)
            self.trials = [Trial(**trial) for trial in stored["trials"]]
        root.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock.take(root / "sweep.lock")

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _check_same(self, stored: Mapping[str, Any]) -> None:
        old, new = stored["space"], self._about["space"]
        lines = [
            f"  {key}: {old.get(key, 'absent')} in the folder, {new.get(key, 'absent')} now"
            for key in dict.fromkeys([*old, *new])
            if old.get(key) != new.get(key)
        ]
        found = changes(stored["config"], self._about["config"], Config())
        swept = [*old, *new]
        lines += [
            f"  {change.key}: {change.old} in the folder, {change.new} now"
            for change in found
            if not change.matches((*_FREE, *swept, *(f"{key}.*" for key in swept)))
        ]
        if lines:
            shown = "\n".join(lines)
            raise UserError(
                f"{self.root} holds a sweep of the same name that differs from this one:\n{shown}\n"
                "give this sweep another --name, or use the values of the first to continue it"
            )

    def write(self) -> None:
        """Write `sweep.json`."""
        data = {**self._about, "trials": [asdict(trial) for trial in self.trials]}
        write_text(self.root / FILE, json.dumps(data, indent=1) + "\n")

    def run(self, trial: Trial) -> RunPaths:
        """The paths of the run of a trial."""
        return RunPaths(self.root / trial.name)

    def refresh(self, trial: Trial) -> None:
        """Take the state of a trial that ended without its sweep, or that Slurm ran, from its run's folder."""
        status = read_status(self.run(trial)) or {"state": "waiting", "reason": ""}
        if trial.state != "pruned":
            trial.state, trial.reason = status["state"], status["reason"]

    def clear(self, trial: Trial) -> None:
        """Remove the folder of a run that ended before its first checkpoint: there is nothing to resume."""
        run = self.run(trial)
        if run.root.is_dir() and not any(run.checkpoints.glob("*.pt")):
            FolderLock.take(run.lock_file).release()  # raises an error if it is in use
            shutil.rmtree(run.root)

    def show(self, advice: str = "; the same command tries them again") -> int:
        """Print the table of the runs. Returns the exit code: 1 if one did not finish."""
        subprocess.run([sys.executable, "-m", "tools.runs", str(self.root)], cwd=PROJECT, check=False)
        failed = [trial for trial in self.trials if trial.state in ("failed", "stopped", "running")]
        for trial in failed:
            print(f"{trial.state}: {trial.name}: {trial.reason or 'see ' + str(self.run(trial).root)}")
        if failed:
            print(f"{len(failed)} of {len(self.trials)} runs did not finish{advice}")
        return 1 if failed else 0


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The options that both programs have."""
    found = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=description, allow_abbrev=False,
        epilog="All other options are settings of train.py, the same for every run.",
    )  # fmt: skip
    found.add_argument("--config", "-c", required=True, help="the config that all runs share")
    found.add_argument("--name", help="folder below experiments/; default: the config's name and _sweep")
    found.add_argument("--random", nargs="+", metavar="KEY=RANGE", help=SPEC)
    found.add_argument("--space", type=Path, metavar="FILE", help="a YAML file with grid: or random:, trials, seed")
    found.add_argument("--trials", type=int, help="number of random trials")
    found.add_argument("--seed", type=int, help="of the random trials; default 0")
    found.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time; GPUs are shared among them")
    return found


def without(words: Sequence[str], *options: str) -> list[str]:
    """`words` without some options and their values."""
    kept: list[str] = []
    for number, word in enumerate(words):
        is_value = number > 0 and words[number - 1] in options
        if word.partition("=")[0] not in options and not is_value:
            kept.append(word)
    return kept
