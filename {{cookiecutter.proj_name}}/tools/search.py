"""Search for good values with Optuna: python -m tools.search --config FILE --random KEY=RANGE ... --trials 30

Each trial is a run in experiments/<name>/. One whose validation is worse than that of most others at the same step is
stopped early. The same command continues a search that was stopped or killed; more --trials extend it.
"""

import argparse
import json
import math
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.base.errors import UserError
from common.config.source import scalar
from common.failure.program import leave, reported
from common.monitor.log import setup_log
from common.run.paths import PROJECT, RunPaths
from cli.advice import explained
from support.sweep.folder import SweepFolder, check_trials, config_of, parser, without
from support.sweep.space import SPEC, Range, Space, Trial, corners, plain_space, read_space, read_space_file, run_name
from support.sweep.training import Training, devices, run_trials
from custom.config import Config

if TYPE_CHECKING:
    from optuna import Study


class Search:
    """An Optuna study whose trials are runs.

    Args:
        trials: the number of trials after which the search ends; failed and pruned ones count.
    """

    def __init__(self, study: "Study", folder: SweepFolder, space: Space, config: Config, trials: int) -> None:
        self.study, self.folder, self.space, self.trials = study, folder, space, trials
        self.metric, self.mode = config.best.metric, config.best_mode
        self._live: dict[str, Any] = {}  # Optuna's trial, by the name of its run
        self._sizes: dict[str, int] = {}  # of the metrics files that were read last
        known = {trial.name for trial in folder.trials}
        started = [each for each in study.get_trials() if "run" in each.user_attrs]
        # Those that were killed before `sweep.json` was written.
        missing = [each.user_attrs for each in started if each.user_attrs["run"] not in known]
        folder.trials += [Trial(each["run"], each["values"]) for each in missing]
        self._unfinished = [each for each in study.get_trials() if not each.state.is_finished()]
        self._count, folder.total = len(started), trials

    def take(self) -> Trial | None:
        """The next trial: one that was interrupted, or a new one; None at the end."""
        from optuna.trial import Trial as Attempt
        from optuna.trial import TrialState

        while self._unfinished:
            frozen = self._unfinished.pop(0)
            if "run" not in frozen.user_attrs:  # killed before its values were chosen
                self.study.tell(frozen.number, state=TrialState.FAIL)
                continue
            trial = next(each for each in self.folder.trials if each.name == frozen.user_attrs["run"])
            self._live[trial.name] = Attempt(self.study, frozen._trial_id)
            return trial
        if self._count >= self.trials:
            return None
        self._count += 1
        attempt = self.study.ask()
        values = {key: suggest(attempt, key, each) for key, each in self.space.items()}
        trial = Trial(f"{attempt.number:03}_{run_name(rounded(values))}", values)
        attempt.set_user_attr("values", values)
        attempt.set_user_attr("run", trial.name)
        self.folder.trials.append(trial)
        self._live[trial.name] = attempt
        return trial

    def watch(self, training: Training) -> None:
        """Report new validations of a running trial, and stop it when Optuna advises to."""
        trial, file = training.trial, self.folder.run(training.trial).metrics_file
        size = file.stat().st_size if file.exists() else 0
        if size == self._sizes.get(trial.name) or trial.state != "running":
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
        found = validations(self.folder.run(trial), self.metric)
        for number, value in enumerate(found):
            if number not in known:
                attempt.report(value, number)
        return found

    def ended(self, training: Training) -> None:
        """Record in the study how a trial ended. One that was stopped by hand is resumed by the same command."""
        from optuna.trial import TrialState

        trial, number = training.trial, self._live[training.trial.name].number
        values = [value for value in self.report(trial) if math.isfinite(value)]
        if trial.state == "finished" and values:
            self.study.tell(number, (min if self.mode == "min" else max)(values))
        elif trial.state == "pruned":
            self.study.tell(number, state=TrialState.PRUNED)
        elif trial.state != "stopped":
            trial.reason = trial.reason or f"no validation has a finite value of {self.metric}"
            trial.state = "failed"
            self.study.tell(number, state=TrialState.FAIL)


def suggest(attempt: Any, key: str, values: list[str] | Range) -> str:
    """The value that Optuna's sampler chooses for a key, as written on a command line."""
    if isinstance(values, list):
        return str(attempt.suggest_categorical(key, values))
    if values.whole:
        return str(attempt.suggest_int(key, int(values.low), int(values.high), log=values.log))
    return repr(attempt.suggest_float(key, values.low, values.high, log=values.log))


def rounded(values: dict[str, str]) -> dict[str, str]:
    """The same with long numbers to three digits, for a name."""
    return {key: f"{scalar(each):.3g}" if isinstance(scalar(each), float) else each for key, each in values.items()}


def validations(run: RunPaths, metric: str) -> list[float]:
    """The values of a metric in the validations so far, in order."""
    lines = run.metrics_file.read_text().splitlines() if run.metrics_file.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete
    return [float(each["values"][metric]) for each in entries if each["event"] == "val" and metric in each["values"]]


def open_study(folder: SweepFolder, mode: str, options: argparse.Namespace) -> "Study":
    """The study of the folder. Raises `UserError` without Optuna."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise UserError(
            f"the search needs Optuna 4 ({error}): python -m pip install optuna\n"
            "random values without it: python -m tools.sweep with --random KEY=RANGE"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder.root / "optuna.journal"))),
        study_name=folder.root.name,
        direction="minimize" if mode == "min" else "maximize",
        pruner=optuna.pruners.NopPruner() if options.no_pruning else optuna.pruners.MedianPruner(options.startup),
        load_if_exists=True,
    )
    # A continued search must not draw the same random numbers again.
    seed = options.seed + 7919 * len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=options.jobs > 1)
    return study


def read_command(argv: Sequence[str]) -> tuple[argparse.Namespace, Space, list[str]]:
    """Options, space, and settings for train.py. Raises `UserError`."""
    found = parser("tools.search", "Search for good values with Optuna.")
    found.add_argument("--startup", type=int, default=5, help="trials that end before the first is stopped; default 5")
    found.add_argument("--no-pruning", action="store_true", help="train every trial to its end")
    options, words = found.parse_known_args(argv)
    if bool(options.random) == bool(options.space):
        raise UserError(f"which values? Give one of --random KEY=RANGE and --space FILE. A range is {SPEC}")
    kind, numbers = "random", dict[str, int]()
    if options.space:
        kind, space, numbers = read_space_file(options.space)
    else:
        space = read_space(options.random, ranges=True)
    if kind == "grid":
        raise UserError(f"--space {options.space}: a search draws its values; write random: instead of grid:")
    options.trials = options.trials or numbers.get("trials", 0)
    options.seed = numbers.get("seed", 0) if options.seed is None else options.seed
    if options.trials < 1 or options.jobs < 1:
        raise UserError("how many trials, and how many at a time? --trials 30 --jobs 1; both must be at least 1")
    return options, space, words


def main(argv: list[str]) -> int:
    """Run or continue a search. Returns the exit code: 1 if a run failed, 130 after Ctrl-C."""
    setup_log("WARNING")
    options, space, words = read_command(argv)
    base = config_of(options.config, words)
    if base.config.dataset.val is None:
        raise UserError("dataset.val is null, but a search compares the results of validation")
    check_trials(options.config, words, [Trial("check", values) for values in corners(space)])
    root = RunPaths.for_run(base.config.dir, options.name or f"{base.config.name}_search", PROJECT).root
    command = shlex.join(["python", "-m", "tools.search", *argv])
    about = {**plain_space(space), "metric": base.config.best.metric}
    with SweepFolder(root, about, base.values, command) as folder:
        study = open_study(folder, base.config.best_mode, options)
        search = Search(study, folder, space, base.config, options.trials)
        slots = devices(base.config.gpu_ids, options.jobs)
        words = [f"--config={options.config}", *without(words, "--dir.expr_dir", *(["--gpu_ids"] if slots[0] else []))]
        print(f"search {root}: {options.trials} trials, {search.metric} should be {search.mode}imal", flush=True)
        if not run_trials(folder, search.take, slots, words, watch=search.watch, ended=search.ended):
            return 130
        code = folder.show("")
        if any(each.value is not None for each in study.get_trials(deepcopy=False)):
            best = study.best_trial
            print(f"best: {best.user_attrs['run']}  {search.metric} {best.value:.6g}")
    return code


if __name__ == "__main__":
    with reported(), explained():
        leave(main(sys.argv[1:]))
