"""Train once for each combination of values: python -m tools.sweep --config FILE --grid KEY=VALUE,VALUE ...

The runs lie in experiments/<name>/. The same command continues a sweep that was stopped or killed.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.base.errors import UserError
from common.base.files import write_text
from common.config import dump
from common.failure.program import leave, reported
from common.monitor.log import setup_log
from common.run.paths import PROJECT, RunPaths
from support.sweep.folder import SweepFolder, check_trials, config_of, parser, without
from support.sweep.space import SPEC, Space, Trial, draw, grid, plain_space, read_space, read_space_file, run_name
from support.sweep.training import devices, run_trials
from custom.config import Config


@dataclass
class Plan:
    """What the command line asks for.

    Attributes:
        words: settings of train.py for every run.
        slurm: options of scripts/slurm.sh; None: train on this machine.
    """

    config: str
    kind: str
    space: Space
    name: str | None
    trials: int | None
    seed: int
    jobs: int
    words: list[str]
    slurm: list[str] | None = None
    values: list[dict[str, str]] = field(default_factory=list)


def read_command(argv: list[str]) -> Plan:
    """The plan of a command line. Raises `UserError` for one that does not describe a sweep."""
    options_of = parser("tools.sweep", "Train once for each combination of values.")
    options_of.add_argument("--grid", nargs="+", metavar="KEY=VALUES", help="every combination; values: a,b,c")
    options_of.add_argument("--slurm", action="store_true", help="one Slurm array; --slurm.gpus 1 and so on: its needs")
    options_of.add_argument("--optuna", action="store_true", help="search with Optuna, see python -m tools.search")
    options, rest = options_of.parse_known_args(argv)
    slurm, words = slurm_words(rest)
    given = [name for name in ("grid", "random", "space") if getattr(options, name)]
    if len(given) != 1:
        raise UserError(
            f"which values? Give one of --grid KEY=A,B, --random KEY=RANGE, --space FILE. A range is {SPEC}"
        )
    numbers: dict[str, int] = {}
    if options.space:
        kind, space, numbers = read_space_file(options.space)
    else:
        kind, space = given[0], read_space(options.grid or options.random, ranges=given[0] == "random")
    trials = numbers.get("trials") if options.trials is None else options.trials
    seed = options.seed if options.seed is not None else numbers.get("seed", 0)
    if kind == "random" and (trials is None or trials < 1):
        raise UserError("how many random trials? --trials 20")
    if kind == "grid" and trials is not None:
        raise UserError("a grid has as many trials as combinations; leave --trials out, or use --random")
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    plan = Plan(options.config, kind, space, options.name, trials, seed, options.jobs, words)
    plan.slurm = slurm if slurm or options.slurm else None
    plan.values = grid(space) if kind == "grid" else draw(space, trials or 0, seed)
    return plan


def slurm_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of scripts/slurm.sh among `words`, and the others."""
    slurm: list[str] = []
    others: list[str] = []
    for number, word in enumerate(words):
        is_value = number and words[number - 1].startswith("--slurm.") and "=" not in words[number - 1]
        (slurm if word.startswith("--slurm.") or is_value else others).append(word)
    if any(word.split("=")[0] == "--slurm.array" for word in slurm):
        raise UserError("--slurm.array: the sweep numbers its runs itself; --jobs 4 allows four at a time")
    return slurm, others


def open_sweep(plan: Plan, command: str) -> tuple[SweepFolder, Config]:
    """Check every trial, then open the folder, with the state of the trials that it holds already."""
    base = config_of(plan.config, plan.words)
    trials: list[Trial] = []
    for values in plan.values:
        taken = [trial.name for trial in trials]
        trials.append(Trial(run_name(values, taken), values))
    check_trials(plan.config, plan.words, trials)
    name = plan.name or f"{base.config.name}_sweep"
    root = RunPaths.for_run(base.config.dir, name, PROJECT).root
    about = {**plain_space(plan.space), **({"seed": plan.seed} if plan.kind == "random" else {})}
    folder = SweepFolder(root, about, base.values, command)
    known = {tuple(trial.values.items()): trial for trial in folder.trials}
    folder.trials = [known.get(tuple(trial.values.items()), trial) for trial in trials]
    for trial in folder.trials:
        folder.refresh(trial)
    folder.write()
    return folder, base.config


def submit(plan: Plan, folder: SweepFolder, waiting: Sequence[Trial]) -> int:
    """Queue one array with a task for each waiting trial. Returns the exit code."""
    numbers = {str(folder.trials.index(trial)): trial.name for trial in waiting}
    trials = folder.root / "trials"
    trials.mkdir(exist_ok=True)
    for number, trial in zip(numbers, waiting, strict=True):
        if trial.state != "running":
            folder.clear(trial)
        write_text(trials / f"{number}.yaml", dump(config_of(plan.config, [*plan.words, *trial.words]).values))
    write_text(trials / "names.json", json.dumps(numbers))
    array = ",".join(numbers) + (f"%{plan.jobs}" if plan.jobs > 1 else "")
    words = [f"--slurm.names={trials}/names.json", f"--slurm.array={array}", *(plan.slurm or [])]
    words += [f"--config={trials}/%a.yaml", f"--name={folder.root.name}", f"--dir.expr_dir={folder.root.parent}"]
    script = ["sh", str(PROJECT / "scripts" / "slurm.sh"), *words, "--resume=auto"]
    code = subprocess.run(script, env={**os.environ, "PYTHON": sys.executable}, check=False).returncode
    if code == 0:
        print(f"when it has ended:  python -m tools.runs {shlex.quote(str(folder.root))}")
        print(f"to train what is missing then:  {folder.command}")
    return code


def main(argv: list[str]) -> int:
    """Run or continue a sweep. Returns the exit code: 1 if a run failed, 130 after Ctrl-C."""
    if "--optuna" in argv:
        words = [word for word in argv if word != "--optuna"]
        os.execv(sys.executable, [sys.executable, "-m", "tools.search", *words])
    setup_log("WARNING")
    plan = read_command(argv)
    folder, config = open_sweep(plan, shlex.join(["python", "-m", "tools.sweep", *argv]))
    with folder:
        waiting = [trial for trial in folder.trials if trial.state != "finished"]
        print(f"sweep {folder.root}: {len(folder.trials)} runs, {len(folder.trials) - len(waiting)} of them finished")
        if plan.slurm is not None:
            return submit(plan, folder, waiting) if waiting else folder.show()
        print(f"follow a run:  tail -f {shlex.quote(str(folder.root))}/RUN/train.log", flush=True)
        queue, slots = iter(waiting), devices(config.gpu_ids, plan.jobs)
        settings = without(plan.words, "--dir.expr_dir", *(["--gpu_ids"] if slots[0] else []))
        if not run_trials(folder, lambda: next(queue, None), slots, [f"--config={plan.config}", *settings]):
            return 130
        return folder.show()


if __name__ == "__main__":
    with reported():
        leave(main(sys.argv[1:]))
