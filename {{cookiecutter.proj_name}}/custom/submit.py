"""Checks a config and prepares a run for Slurm: python -m custom.submit [OPTION ...] -- --config FILE ...

Called by scripts/slurm.sh, which queues the job. Prints three lines: the run's folder, the job's folder, and the number
of GPUs per node.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import UserError
from common.config import Resolved, option_value
from common.config.registry import REGISTRIES
from common.failure.program import reported
from common.monitor.log import setup_log
from common.run.paths import PROJECT, RunPaths
from cli.command_line import parse
from cli.stored_config import stored_config
from support.slurm.submission import array_tasks, frozen, gpus_per_node, job_folder, prepare, run_of_task, words_of_task
from custom.config import Config


def main(argv: list[str]) -> int:
    """Prepare one job, or an array of jobs. Returns the exit code."""
    setup_log()
    options, words = read_options(argv)
    if count := option_value(words, "--dist.processes"):
        raise UserError(f"--dist.processes {count}: under Slurm, srun starts the processes; use --slurm.tasks {count}")
    tasks: list[int | None] = [None] if options.array is None else [*array_tasks(options.array)]
    resolved = {task: resolve(words_of_task(words, task)) for task in tasks}
    folder, config = common_folder(resolved), resolved[tasks[0]].config
    gpus = gpus_per_node(config.gpu_ids, options.gpus, typed=option_value(words, "--gpu_ids") is not None)
    names = read_names(options.names, tasks)
    values = {
        task: frozen(each.values, run_of_task(folder, task, names), PROJECT, gpus) for task, each in resolved.items()
    }
    job = job_folder(folder)
    if not options.dry_run:
        prepare(job, values, folder, PROJECT)
    print(folder.root, job, gpus, sep="\n")
    return 0


def read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, and the words of train.py's command line after it."""
    parser = argparse.ArgumentParser(prog="python -m custom.submit", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only check, write nothing")
    parser.add_argument("--array", metavar="TASKS", help="one run for each of these numbers, in sbatch's notation")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs per node; default: as many as the config's gpu_ids")
    parser.add_argument("--names", type=Path, metavar="FILE", help="names of the array's runs: {number: name}, as JSON")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def read_names(file: Path | None, tasks: Sequence[int | None]) -> dict[int, str]:
    """The names of the runs of an array, by task. Raises `UserError` if the file has not one for each."""
    if file is None:
        return {}
    names = {int(number): str(name) for number, name in json.loads(file.read_text()).items()}
    if not set(tasks) <= names.keys():
        raise UserError(f"--slurm.names {file}: has no name for some of the tasks {tasks}")
    return names


def resolve(words: Sequence[str]) -> Resolved[Config]:
    """The config that train.py would read from the same words."""
    return parse(
        Config,
        words,
        prog="slurm.sh",
        registries=REGISTRIES,
        default=stored_config(words, "--resume") or PROJECT / "configs" / "default.yaml",
        debug_overlay=PROJECT / "configs" / "debug.yaml",
    )


def common_folder(resolved: dict[int | None, Resolved[Config]]) -> RunPaths:
    """The folder of the run, or of the whole array."""
    roots = {RunPaths.for_run(each.config.dir, each.config.name, PROJECT).root: None for each in resolved.values()}
    if len(roots) > 1:
        raise UserError(
            f"the tasks of an array share a folder with one subfolder each (task_0, ...), but --name or"
            f" --dir.expr_dir gives {', '.join(map(str, list(roots)[:3]))}; leave %a out of it"
        )
    return RunPaths(Path(*roots))


if __name__ == "__main__":
    with reported():
        sys.exit(main(sys.argv[1:]))
