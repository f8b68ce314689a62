"""Prepare a Slurm job, for scripts/slurm.sh: python -m tools.slurm [OPTION ...] -- --config FILE ...

Checks the config, and puts it and a copy of the code in the job's own folder, `experiments/.jobs/<name>/<time>`, so
that later edits do not change the job. The run's folder is not touched: an earlier run of that name stays there until
the job trains. Prints three lines: the run's folder, the job's folder, and the number of GPUs per node.
"""

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.files import unused_path, write_text
from common.checkpoint.weights import weights_path
from common.config import Resolved, dump, option_value
from common.distributed.devices import GpuIds
from common.monitor.log import setup_log
from common.run.folder import refuse_weights_in_moved_run
from common.run.paths import PROJECT, RunPaths, data_dir
from common.run.status import FolderLock
from cli.command_line import parse
from cli.program import run, with_config_of_run
from tools.slurm.snapshot import snapshot
from custom.config import Config

_TASK = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")


def main(argv: list[str]) -> int:
    """Prepare one job, or an array of jobs. Returns the exit code."""
    setup_log()
    options, words = read_options(argv)
    tasks: list[int | None] = [None]
    if options.array is not None:
        tasks = [*array_tasks(options.array)]
    resolved = []
    for task in tasks:
        if task is None and any("%a" in word for word in words):
            raise UserError("%a stands for the number of a task: it needs --slurm.array")
        resolved.append(resolve([word.replace("%a", str(task)) for word in words]))
    for result in resolved:
        count = result.config.dist.processes
        if count:
            raise UserError(
                f"dist.processes is {count}: under Slurm, srun starts the processes; use --slurm.tasks {count}, and "
                "--dist.processes null if a file sets it"
            )
    folder = common_folder(resolved)
    jobs = folder.root.parent / ".jobs" / folder.name
    gpu_ids = resolved[0].config.gpu_ids
    gpus = gpus_per_node(gpu_ids, options.gpus, typed=option_value(words, "--gpu_ids") is not None)
    names = {}
    if options.names:
        names = json.loads(options.names.read_text())
    values = {}
    for task, result in zip(tasks, resolved, strict=True):
        run = folder
        if task is not None:
            run = RunPaths(folder.root / names.get(str(task), f"task_{task}"))
        values[task] = freeze_config(result.values, run, gpus)
    job = unused_path(jobs / f"{datetime.now():%Y%m%d-%H%M%S}")
    if not options.dry_run:
        if options.array is not None and folder.record_file.exists():
            raise UserError(f"{folder.root} is the folder of a run; give the array another --name")
        check_unused(folder, jobs)
        prepare(job, values, folder)
    print(folder.root, job, gpus, sep="\n")
    return 0


def read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the options before `--`, and the words of train.py's command line after it."""
    parser = argparse.ArgumentParser(prog="python -m tools.slurm", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only check, write nothing")
    parser.add_argument("--array", metavar="TASKS", help="one run for each of these numbers, in sbatch's notation")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs per node; default: as many as the config's gpu_ids")
    parser.add_argument("--names", type=Path, metavar="FILE", help="names of the array's runs: {number: name}, as JSON")
    cut = [*argv, "--"].index("--")
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def resolve(words: Sequence[str]) -> Resolved[Config]:
    """Return the config that train.py would read from the same words."""
    return parse(Config, with_config_of_run(words), prog="slurm.sh", default=PROJECT / "configs" / "default.yaml")


def common_folder(resolved: Sequence[Resolved[Config]]) -> RunPaths:
    """Return the folder of the run, or of the whole array. Raises `UserError` if the tasks of an array have several."""
    folders = [RunPaths.for_run(each.config.dir, each.config.name, PROJECT) for each in resolved]
    if any(folder.root != folders[0].root for folder in folders):
        raise UserError("--slurm.array: the tasks share one folder; leave %a out of --name and --dir.runs_dir")
    return folders[0]


def array_tasks(text: str) -> list[int]:
    """Return the numbers in Slurm's `--array` notation: `0-4`, `1,3,7-9:2`, and `0-99%4` for four at a time.

    Raises:
        UserError: `text` is not in that notation.
    """
    numbers = set[int]()
    for part in re.sub(r"%[1-9]\d*$", "", text).split(","):
        match = _TASK.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--slurm.array: {text!r} is not a list of tasks; write 0-4, 1,3,5 or 0-99%4 (4 at a time)")
        first, last, step = match.groups()
        numbers.update(range(int(first), int(last or first) + 1, int(step or 1)))
    return sorted(numbers)


def gpus_per_node(gpu_ids: GpuIds, asked: int | None, typed: bool) -> int:
    """Number of GPUs the job requests on each node: `asked`, else the number of the config's `gpu_ids`.

    Args:
        typed: `gpu_ids` is on the command line, not only in a file.

    Raises:
        UserError: the two contradict each other on the command line, or neither gives a number.
    """
    if isinstance(gpu_ids, str):  # all, mps
        if asked is None:
            raise UserError(
                f"gpu_ids: {gpu_ids} does not say how many GPUs to ask Slurm for; add --slurm.gpus N, for each node"
            )
        return asked
    count = 1
    if isinstance(gpu_ids, list):
        count = len(gpu_ids)
    if gpu_ids in (-1, [-1]):
        count = 0
    if asked is None:
        return count
    if typed and asked != count:
        raise UserError(f"--gpu_ids has {count} GPU(s) per node, but --slurm.gpus is {asked}; leave one of them out")
    return asked


def freeze_config(values: Mapping[str, Any], run: RunPaths, gpus: int) -> dict[str, Any]:
    """Return a config's values, adapted to the copy of the code (another project root) and to the cluster's nodes.

    Other relative paths are kept: the job runs in the project's folder, like the command that submits it.

    Raises:
        UserError: a new run would start from weights of the run whose folder it takes.
    """
    init_path = weights_path(values["init_from"]["path"], PROJECT)
    gpu_ids: int | list[int] = -1
    if gpus:
        gpu_ids = list(range(gpus))
    if not run.contains(values["resume"]):
        refuse_weights_in_moved_run(init_path, run)
    folders = dict(values["dir"])
    eval_dir = folders["eval_dir"]
    if eval_dir is not None:
        folders["eval_dir"] = str(PROJECT / Path(eval_dir).expanduser())
    folders["runs_dir"] = str(run.root.parent)
    folders["data_dir"] = str(data_dir(folders["data_dir"], PROJECT))
    return {
        **values,
        "name": run.name,
        "dir": folders,
        "init_from": {**values["init_from"], "path": init_path},
        "gpu_ids": gpu_ids,
        "dist": {**values["dist"], "processes": None, "launcher": "auto"},  # srun starts them
    }


def prepare(job: Path, configs: Mapping[int | None, Mapping[str, Any]], folder: RunPaths) -> None:
    """Put the code and the configurations in the folder `job`.

    Args:
        configs: frozen values by task; a single entry, for None, without an array.
        folder: of the run, or of the array.

    Raises:
        UserError: the folder cannot be written.
    """
    data = Path(next(iter(configs.values()))["dir"]["data_dir"])
    try:
        folder.root.parent.mkdir(exist_ok=True)
        others = [each for each in (folder.root.parent, data) if not PROJECT.is_relative_to(each)]
        snapshot(PROJECT, job / "code", [*others, PROJECT / "experiments", PROJECT / "data"])
        for task, values in configs.items():
            name = "config.yaml"
            if task is not None:
                name = f"config_{task}.yaml"
                write_text(job / f"run_{task}", f"{values['dir']['runs_dir']}/{values['name']}")
            write_text(job / name, f"# Frozen when the run {folder.name!r} was submitted.\n{dump(dict(values))}")
    except OSError as error:
        shutil.rmtree(job, ignore_errors=True)
        raise UserError(f"{job} cannot be written: {error}; choose another place with --dir.runs_dir") from error


def check_unused(folder: RunPaths, jobs: Path) -> None:
    """Reject a run in use by a process, or by a queued or running job, whose folder is in `jobs`.

    Raises:
        UserError: with the process or job, and how to stop it.
    """
    command = ["squeue", "--noheader", "--format=%F %T %Z"]  # job, state, working directory
    if shutil.which("squeue") is not None:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for job, state, folder_of_job in (line.split(" ", 2) for line in listed.splitlines()):
            if Path(folder_of_job).parent == jobs:
                raise UserError(
                    f"{folder.root} belongs to job {job}, which is {state}; wait for it, stop it (scancel {job}),"
                    " or give this run another --name"
                )
    for lock in (folder.lock_file, *folder.root.glob("*/run.lock")):
        if lock.exists():
            FolderLock.take(lock).release()  # raises an error if it is in use


if __name__ == "__main__":
    run(main)
