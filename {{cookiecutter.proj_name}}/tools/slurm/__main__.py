"""Prepare a Slurm job, for scripts/slurm.sh: python -m tools.slurm [OPTION ...] -- --config FILE ...

Checks the config, copies the code, and prints three lines: the run's folder, the job's folder, and the number of GPUs
per node. scripts/slurm.sh then queues the job.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import UserError
from common.config import Resolved, option_value
from common.config.registry import REGISTRIES
from common.failure.program import report_errors
from common.monitor.log import setup_log
from common.run.paths import PROJECT, RunPaths
from cli.command_line import parse
from cli.stored_config import stored_config
from tools.slurm.submission import array_tasks, frozen, gpus_per_node, job_folder, prepare
from custom.config import Config

_TASK_WORD = "%a"  # sbatch's placeholder for the task's number in file names


def main(argv: list[str]) -> int:
    """Prepare one job, or an array of jobs. Returns the exit code."""
    setup_log()
    options, words = read_options(argv)
    if count := option_value(words, "--dist.processes"):
        raise UserError(f"--dist.processes {count}: under Slurm, srun starts the processes; use --slurm.tasks {count}")
    if options.array is None:
        resolved: dict[int | None, Resolved[Config]] = {None: resolve(words)}
    else:
        tasks = array_tasks(options.array)
        resolved = {task: resolve([word.replace(_TASK_WORD, str(task)) for word in words]) for task in tasks}
    folder, gpu_ids = common_folder(resolved), next(iter(resolved.values())).config.gpu_ids
    gpus = gpus_per_node(gpu_ids, options.gpus, typed=option_value(words, "--gpu_ids") is not None)
    names = {task: f"task_{task}" for task in resolved}
    if options.names:
        given = json.loads(options.names.read_text())
        if missing := [task for task in resolved if str(task) not in given]:
            raise UserError(f"--slurm.names {options.names}: has no name for the tasks {missing}")
        names = {task: given[str(task)] for task in resolved}
    values = {}
    for task, each in resolved.items():
        run = folder if task is None else RunPaths(folder.root / names[task])
        values[task] = frozen(each.values, run, PROJECT, gpus)
    job = job_folder(folder)
    if not options.dry_run:
        prepare(job, values, folder, PROJECT)
    print(folder.root, job, gpus, sep="\n")
    return 0


def read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, and the words of train.py's command line after it."""
    parser = argparse.ArgumentParser(prog="python -m tools.slurm", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only check, write nothing")
    parser.add_argument("--array", metavar="TASKS", help="one run for each of these numbers, in sbatch's notation")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs per node; default: as many as the config's gpu_ids")
    parser.add_argument("--names", type=Path, metavar="FILE", help="names of the array's runs: {number: name}, as JSON")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def resolve(words: Sequence[str]) -> Resolved[Config]:
    """The config that train.py would read from the same words."""
    default = stored_config(words, "--resume") or PROJECT / "configs" / "default.yaml"
    debug = PROJECT / "configs" / "debug.yaml"
    return parse(Config, words, prog="slurm.sh", registries=REGISTRIES, default=default, debug_overlay=debug)


def common_folder(resolved: dict[int | None, Resolved[Config]]) -> RunPaths:
    """The folder of the run, or of the whole array. Raises `UserError` if the tasks of an array have several."""
    roots = {RunPaths.for_run(each.config.dir, each.config.name, PROJECT).root: None for each in resolved.values()}
    if len(roots) > 1:
        raise UserError(
            f"the tasks of an array share a folder with one subfolder each (task_0, ...), but --name or"
            f" --dir.expr_dir gives {', '.join(map(str, list(roots)[:3]))}; leave %a out of it"
        )
    return RunPaths(Path(*roots))


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
