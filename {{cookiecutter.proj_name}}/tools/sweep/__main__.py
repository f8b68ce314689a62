"""Train once for each combination of values: python -m tools.sweep --config FILE --grid KEY=VALUE,VALUE ...

The runs lie in experiments/<name>/. The same command continues a sweep that was stopped or killed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from common.base.errors import UserError
from common.base.files import write_text
from common.config import ConfigError, Problem, Resolved, dump, option_value
from common.monitor.log import setup_log
from common.run.paths import PROJECT, RunPaths
from cli.command_line import parse
from cli.program import run
from tools.sweep.runs import SweepFolder, devices, run_trials
from tools.sweep.space import Trial, grid, read_space, run_name
from custom.config import Config

SLURM = PROJECT / "scripts" / "slurm.sh"


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options; `values` read, and as `words` the settings of train.py.

    Raises `UserError` if they make no sweep.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep", description=__doc__.partition(":")[0] + ".", allow_abbrev=False,
        epilog="All other options are settings of train.py, the same for every run.",
    )  # fmt: skip
    parser.add_argument("--config", "-c", required=True, help="the config that all runs share")
    parser.add_argument("--name", help="folder below experiments/; default: the config's name and _sweep")
    parser.add_argument(
        "--grid", nargs="+", action="extend", required=True, metavar="KEY=VALUES", help="to combine; values: a,b,c"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="N combinations at random; default: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice; default 0")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time; they share the GPUs")
    parser.add_argument("--slurm", action="store_true", help="one Slurm array; --slurm.gpus 1 and so on: its needs")
    options, rest = parser.parse_known_args(argv)
    slurm, options.words = split_words(rest, "--slurm.")
    options.slurm = slurm if slurm or options.slurm else None
    options.values = read_space(options.grid)
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    if option_value(slurm, "--slurm.array"):
        raise UserError("--slurm.array: the sweep numbers its runs itself; see --jobs")
    return options


def split_words(words: Sequence[str], *options: str) -> tuple[list[str], list[str]]:
    """Return the options that begin with one of `options`, with their values; and all other words."""
    chosen, others = list[str](), list[str]()
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith(options) and "=" not in before
        (chosen if word.startswith(options) or is_value else others).append(word)
    return chosen, others


def read_config(options: argparse.Namespace, *words: str) -> Resolved[Config]:
    """Return what train.py would read, with these words too. Raises `ConfigError`."""
    return parse(Config, ["--config", options.config, *options.words, *words], prog="tools.sweep")


def plan(options: argparse.Namespace) -> list[Trial]:
    """Return the trials.

    Raises:
        UserError: a key is also set for all runs.
        ConfigError: with the problems of the configs of all trials, each once.
    """
    for key in options.values:
        if (value := option_value(options.words, f"--{key}")) is not None:
            raise UserError(f"{key} is among the values to try, and also set for all runs (--{key} {value}); keep one")
    trials, problems = list[Trial](), dict[str, Problem]()
    for item in grid(options.values, options.trials, options.seed):
        trial = Trial(run_name(item, [trial.name for trial in trials]), item)
        trials.append(trial)
        try:
            trial.config = read_config(options, *trial.words, f"--name={trial.name}", "--resume=auto").values
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError(list(problems.values()))
    return trials


def submit(options: argparse.Namespace, folder: SweepFolder, waiting: Sequence[Trial]) -> int:
    """Queue one array with a task for each waiting trial. Returns the exit code."""
    if not SLURM.exists():
        raise UserError(f"--slurm: this project has no {SLURM.relative_to(PROJECT)}; train here with --jobs N")
    numbers = {str(folder.trials.index(trial)): trial.name for trial in waiting}
    trials = folder.root / "trials"
    trials.mkdir(exist_ok=True)
    for number, trial in zip(numbers, waiting, strict=True):
        if trial.state != "running":
            folder.clear(trial)
        write_text(trials / f"{number}.yaml", dump(trial.config))
    write_text(trials / "names.json", json.dumps(numbers))
    array = ",".join(numbers) + (f"%{options.jobs}" if options.jobs else "")
    words = [f"--slurm.names={trials}/names.json", f"--slurm.array={array}", *options.slurm]
    words += [f"--config={trials}/%a.yaml", f"--name={folder.root.name}", f"--dir.runs_dir={folder.root.parent}"]
    environment = {**os.environ, "PYTHON": sys.executable}
    code = subprocess.run(["sh", str(SLURM), *words, "--resume=auto"], env=environment, check=False).returncode
    if code == 0:
        print(f"when it has ended:  python -m tools.runs {shlex.quote(str(folder.root))}")
        print(f"to train what is missing then:  {folder.command}")
    return code


def main(argv: list[str]) -> int:
    """Run or continue a sweep. Returns the exit code: 1 if a run failed, 130 after Ctrl-C."""
    setup_log("WARNING")
    options = read_command(argv)
    config = read_config(options).config
    trials = plan(options)
    root = RunPaths.for_run(config.dir, options.name or f"{config.name}_sweep", PROJECT).root
    slots = devices(config.gpu_ids, options.jobs or 1)
    _, words = split_words(options.words, "--dir.runs_dir", *(["--gpu_ids"] if slots[0] else []))
    words = [f"--config={options.config}", *words]
    with SweepFolder(root, trials, shlex.join(["python", "-m", "tools.sweep", *argv])) as folder:
        waiting = [trial for trial in trials if trial.state != "finished"]
        print(f"sweep {root}: {len(trials)} runs, {len(trials) - len(waiting)} of them finished")
        if options.slurm is not None:
            return submit(options, folder, waiting) if waiting else folder.show()
        print(f"follow a run:  tail -f {shlex.quote(str(root))}/RUN/train.log", flush=True)
        return folder.show() if run_trials(folder, waiting, slots, words) else 130


if __name__ == "__main__":
    run(main)
