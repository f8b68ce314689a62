"""The files of a queued job: a copy of the code and a frozen configuration, so later edits do not change the job.

They lie in the job's own folder, `experiments/.jobs/<name>/<time>`. The run's folder is not touched: an earlier run
of that name stays there until the job trains.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.files import unused, write_text
from common.checkpoint import weights_path
from common.config import dump
from common.distributed.devices import GpuIds
from common.run.folder import refuse_sources_in_moved_run
from common.run.lock import FolderLock
from common.run.paths import DirConfig, RunPaths, data_dir
from tools.slurm.snapshot import snapshot

_TASK = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")


def array_tasks(text: str) -> list[int]:
    """The numbers in Slurm's `--array` notation: `0-4`, `1,3,7-9:2`, and `0-99%4` for four at a time.

    Raises:
        UserError: `text` is not in that notation.
    """
    numbers = set[int]()
    for part in re.sub(r"%[1-9]\d*$", "", text).split(","):
        match = _TASK.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--slurm.array: {text!r} is not a list of tasks; write 0-4, 1,3,5 or 0-99%4 (4 at a time)")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1)))
    return sorted(numbers)


def gpus_per_node(gpu_ids: GpuIds, asked: int | None, typed: bool) -> int:
    """Number of GPUs the job requests on each node: `asked`, else the number of the config's `gpu_ids`.

    Args:
        typed: `gpu_ids` is on the command line, not only in a file.

    Raises:
        UserError: the two contradict each other on the command line, or neither gives a number.
    """
    if isinstance(gpu_ids, str):  # all, mps
        if not asked:
            raise UserError(
                f"gpu_ids: {gpu_ids} does not say how many GPUs to ask Slurm for; add --slurm.gpus N, for each node"
            )
        return asked
    wanted = gpu_ids if isinstance(gpu_ids, list) else [gpu_ids]
    count = 0 if wanted == [-1] else len(wanted)
    if typed and asked not in (None, count):
        raise UserError(f"--gpu_ids has {count} GPU(s) per node, but --slurm.gpus is {asked}; leave one of them out")
    return count if asked is None else asked


def frozen(values: Mapping[str, Any], run: RunPaths, project: Path, gpus: int) -> dict[str, Any]:
    """A config's values, adapted to the copy of the code (another project root) and to the cluster's nodes.

    Other relative paths are kept: the job runs in the folder `project`, like the command that submits it.

    Raises:
        UserError: a new run would start from weights of the run whose folder it takes.
    """
    init_path = weights_path(values["init_from"]["path"], project)
    if values["progress"]["start_epoch"] == 0 or not run.contains(values["resume"]):
        refuse_sources_in_moved_run({"resume": values["resume"], "init_from.path": init_path}, run)
    eval_dir = values["dir"]["eval_dir"]
    return {
        **values,
        "name": run.name,
        "dir": {
            "expr_dir": str(run.root.parent),
            "data_dir": str(data_dir(DirConfig(**values["dir"]), project)),
            "eval_dir": None if eval_dir is None else str(project / Path(eval_dir).expanduser()),
        },
        "init_from": {**values["init_from"], "path": init_path},
        "gpu_ids": list(range(gpus)) if gpus else -1,
        "dist": {**values["dist"], "processes": None, "launcher": "auto"},  # srun starts them
    }


def job_folder(folder: RunPaths) -> Path:
    """Unused path for the folder of the next job of the run, or of the array."""
    return unused(_jobs(folder) / f"{datetime.now():%Y%m%d-%H%M%S}")


def prepare(job: Path, configs: Mapping[int | None, Mapping[str, Any]], folder: RunPaths, project: Path) -> None:
    """Put the code and the configurations in the folder `job`.

    Args:
        configs: frozen values by task; a single entry, for None, without an array.
        folder: of the run, or of the array.

    Raises:
        UserError: a job of this run is queued or running, or the folder cannot be written.
    """
    _check_unused(folder)
    data = Path(next(iter(configs.values()))["dir"]["data_dir"])
    try:
        folder.root.parent.mkdir(exist_ok=True)
        snapshot(project, job / "code", [folder.root.parent, data, project / "experiments", project / "data"])
        for task, values in configs.items():
            file = job / ("config.yaml" if task is None else f"config_{task}.yaml")
            if task is not None:
                write_text(job / f"run_{task}", f"{values['dir']['expr_dir']}/{values['name']}")
            write_text(file, f"# Frozen when the run {folder.name!r} was submitted.\n{dump(dict(values))}")
    except OSError as error:
        shutil.rmtree(job, ignore_errors=True)
        raise UserError(f"{job} cannot be written: {error}; choose another place with --dir.expr_dir") from error


def _jobs(folder: RunPaths) -> Path:
    return folder.root.parent / ".jobs" / folder.name


def _check_unused(folder: RunPaths) -> None:
    """Reject a run in use by a process, or by a queued or running job.

    Raises:
        UserError: with the process or job, and how to stop it.
    """
    command = ["squeue", "--noheader", "--format=%F %T %Z"]  # job, state, working directory
    if shutil.which("squeue") is not None:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for job, state, place in (line.split(" ", 2) for line in listed.splitlines()):
            if Path(place).parent == _jobs(folder):
                raise UserError(
                    f"{folder.root} belongs to job {job}, which is {state}; wait for it, stop it (scancel {job}),"
                    " or give this run another --name"
                )
    for lock in (folder.lock_file, *folder.root.glob("*/run.lock")):
        if lock.exists():
            FolderLock.take(lock).release()  # raises an error if it is in use
