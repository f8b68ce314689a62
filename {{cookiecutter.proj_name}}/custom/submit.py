"""Checks a configuration and prepares a run for Slurm: python -m custom.submit [OPTION ...] -- --config FILE ...

For scripts/slurm.sh, which queues the job. Prints three lines: the run's folder, what this submission's files in its
folder `slurm` are called after `config` and `job`, and the number of GPUs on each node; and a fourth where an earlier
run was moved out of the way: its folder now.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import UserError
from common.config import Resolved, option_value, parse
from common.config.registry import REGISTRIES
from common.failure.program import reported
from common.monitor.log import setup_log
from common.run.folder import stored_config
from common.run.paths import RunPaths
from common.slurm.submission import array_tasks, continues_in_place, frozen, gpus_per_node, prepare, words_of_task
from custom.build import PROJECT
from custom.config import Config


def main(argv: list[str]) -> int:
    """Prepare one job, or an array of them. Returns the exit code."""
    setup_log()
    options, words = read_options(argv)
    if count := option_value(words, "--dist.processes"):
        raise UserError(f"--dist.processes {count}: under Slurm, srun starts the processes; use --slurm.tasks {count}")
    tasks: list[int | None] = [None] if options.array is None else [*array_tasks(options.array)]
    resolved = {task: resolve(words_of_task(words, task)) for task in tasks}
    folder, config = common_folder(resolved), resolved[tasks[0]].config
    keep = continues_in_place(config.resume, config.progress.start_epoch, folder) or options.keep
    gpus = gpus_per_node(config.gpu_ids, options.gpus, typed=option_value(words, "--gpu_ids") is not None)
    values = {task: frozen(each.values, folder, PROJECT, gpus, task) for task, each in resolved.items()}
    suffix, moved = ("", None) if options.dry_run else prepare(folder, values, PROJECT, keep=keep)
    print(folder.root, suffix, gpus, *([] if moved is None else [moved]), sep="\n")
    return 0


def read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, and the words of the training's own command line after it."""
    parser = argparse.ArgumentParser(prog="python -m custom.submit", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="check, and leave the disk alone")
    parser.add_argument("--keep", action="store_true", help="go on in the run's folder if there is one")
    parser.add_argument("--array", metavar="TASKS", help="one run for each of these numbers, as sbatch has them")
    parser.add_argument("--gpus", type=int, metavar="N", help="on each node; default: as many as the config's gpu_ids")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def resolve(words: Sequence[str]) -> Resolved[Config]:
    """The configuration that train.py would read from the same words."""
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
            f"the tasks of an array share a folder, with one of its own for each (task_0, ...), but --name or"
            f" --dir.expr_dir gives {', '.join(map(str, list(roots)[:3]))}; leave %a out of it"
        )
    return RunPaths(Path(*roots))


if __name__ == "__main__":
    with reported():
        sys.exit(main(sys.argv[1:]))
