"""A search with Optuna: it chooses the values of each trial, and ends those that are worse than most others."""

import math
import signal
import warnings
from argparse import Namespace
from typing import Any

from common.base.errors import UserError
from common.config.source import scalar
from common.run.metrics import read_metrics
from tools.sweep.runs import SweepFolder, Training
from tools.sweep.space import Range, Space, Trial, run_name
from custom.config import Config

_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}  # of Optuna's trials; others are resumed


class Search:
    """An Optuna study whose trials are runs.

    Args:
        trials: the number of trials after which the search ends; failed and pruned ones count.
    """

    def __init__(self, study: Any, folder: SweepFolder, space: Space, config: Config, trials: int) -> None:
        self.study, self.folder, self.space, self.trials = study, folder, space, trials
        self.metric, self.mode = config.best.metric, config.best_mode
        self._live: dict[str, Any] = {}  # Optuna's trial, by the name of its run
        self._sizes: dict[str, int] = {}  # of the metrics files that were read last
        started = [trial for trial in study.get_trials() if "run" in trial.user_attrs]
        for trial in started:
            name, values = trial.user_attrs["run"], trial.user_attrs["values"]
            folder.trials.append(Trial(name, values, _STATES.get(trial.state.name, "waiting")))
        self._unfinished = [trial for trial in started if not trial.state.is_finished()]
        self._count, folder.total = len(started), trials

    def take(self) -> Trial | None:
        """Return the next trial: one that was interrupted, or a new one; None at the end."""
        from optuna.trial import Trial as Attempt

        if self._unfinished:
            frozen = self._unfinished.pop(0)
            trial = next(trial for trial in self.folder.trials if trial.name == frozen.user_attrs["run"])
            self._live[trial.name] = Attempt(self.study, frozen._trial_id)
            return trial
        if self._count >= self.trials:
            return None
        self._count += 1
        attempt = self.study.ask()
        values = {key: suggest(attempt, key, choices) for key, choices in self.space.items()}
        short = {
            key: f"{scalar(text):.3g}" if isinstance(scalar(text), float) else text for key, text in values.items()
        }
        trial = Trial(f"{attempt.number:03}_{run_name(short)}", values)
        attempt.set_user_attr("values", values)
        attempt.set_user_attr("run", trial.name)
        self.folder.trials.append(trial)
        self._live[trial.name] = attempt
        return trial

    def watch(self, training: Training) -> None:
        """Report new validations of a running trial, and stop it when Optuna advises to."""
        trial, file = training.trial, self.folder.run(training.trial).metrics_file
        size = file.stat().st_size if file.exists() else 0
        if trial.state != "running" or self._sizes.get(trial.name) == size:
            return
        self._sizes[trial.name] = size
        self.report(trial)
        if self._live[trial.name].should_prune():
            trial.state = "pruned"
            training.process.send_signal(signal.SIGTERM)

    def report(self, trial: Trial) -> list[float]:
        """Report validations that Optuna does not know yet, by their number. Returns the values of all of them."""
        attempt = self._live[trial.name]
        known = self.study.get_trials(deepcopy=False)[attempt.number].intermediate_values
        file, metric = self.folder.run(trial).metrics_file, self.metric
        rows = read_metrics(file) if file.exists() else []
        values = [row["values"][metric] for row in rows if row["event"] == "val" and metric in row["values"]]
        for number, value in enumerate(values):
            if number not in known:
                attempt.report(value, number)
        return values

    def record_end(self, training: Training) -> None:
        """Record in the study how a trial ended. One that was stopped by hand is resumed by the same command."""
        from optuna.trial import TrialState

        trial, number = training.trial, self._live[training.trial.name].number
        values = [value for value in self.report(trial) if math.isfinite(value)]
        if trial.state == "finished" and values:
            self.study.tell(number, (min if self.mode == "min" else max)(values))
        elif trial.state == "pruned":
            self.study.tell(number, state=TrialState.PRUNED)
        elif trial.state != "stopped":
            trial.state, trial.reason = "failed", trial.reason or f"no validation has a finite value of {self.metric}"
            self.study.tell(number, state=TrialState.FAIL)

    def best(self) -> str:
        """Return a line with the best trial so far; "" without."""
        if not any(trial.value is not None for trial in self.study.get_trials(deepcopy=False)):
            return ""
        trial = self.study.best_trial
        return f"best: {trial.user_attrs['run']}  {self.metric} {trial.value:.6g}"


def suggest(attempt: Any, key: str, values: list[str] | Range) -> str:
    """Return the value that Optuna's sampler chooses for a key, as written on a command line."""
    if isinstance(values, list):
        return str(attempt.suggest_categorical(key, values))
    draw, kind = (attempt.suggest_int, int) if values.whole else (attempt.suggest_float, float)
    return repr(draw(key, kind(values.low), kind(values.high), log=values.log))


def open_study(folder: SweepFolder, mode: str, options: Namespace) -> Any:
    """Return the study of the folder. Raises `UserError` without Optuna."""
    try:
        import optuna
        from optuna.storages import journal
    except ImportError as error:
        raise UserError(
            f"the search needs Optuna 4 ({error}): python -m pip install optuna\n"
            "random values without it: python -m tools.sweep with --random KEY=RANGE"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    storage = journal.JournalStorage(journal.JournalFileBackend(str(folder.root / "optuna.journal")))
    about = {"study_name": folder.root.name, "direction": f"{mode}imize", "load_if_exists": True}
    study = optuna.create_study(storage=storage, pruner=optuna.pruners.MedianPruner(options.startup), **about)
    # A continued search must not draw the same random numbers again.
    seed = options.seed + 7919 * len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=options.jobs > 1)
    return study
