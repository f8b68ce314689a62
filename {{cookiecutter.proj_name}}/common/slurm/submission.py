"""What a queued job runs: a copy of the code and a frozen configuration, so that editing either changes no job."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from common.base.errors import UserError
from common.base.files import write_text
from common.config import dump
from common.distributed.devices import GpuIds
from common.run.folder import archive, check_stays
from common.run.lock import alone_in, check_free
from common.run.paths import RunPaths
from common.slurm.snapshot import code_files, snapshot

_TASK = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")
_TASK_WORD = "%a"  # what sbatch writes for the task's number in names of files


def array_tasks(text: str) -> list[int]:
    """The numbers in Slurm's `--array` notation: `0-4`, `1,3,7-9:2`, and `0-99%4` for four at a time.

    Raises:
        UserError: it is not in that notation.
    """
    numbers = set[int]()
    for part in re.sub(r"%[1-9]\d*$", "", text).split(","):
        match = _TASK.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--slurm.array: {text!r} is no list of tasks; write 0-4, 1,3,5 or 0-99%4 (four at a time)")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1)))
    return sorted(numbers)


def words_of_task(words: Sequence[str], task: int | None) -> list[str]:
    """The command line of one task of an array: `%a` is its number."""
    return list(words) if task is None else [word.replace(_TASK_WORD, str(task)) for word in words]


def gpus_per_node(gpu_ids: GpuIds, asked: int | None, typed: bool) -> int:
    """How many GPUs the job takes on each node: as asked for, else as many as the config's `gpu_ids`.

    Args:
        typed: `gpu_ids` stands on the command line too, and not only in a file.

    Raises:
        UserError: the two contradict each other on the command line, or neither says how many.
    """
    if gpu_ids == "all":
        if not asked:
            raise UserError(
                "gpu_ids: all does not say how many GPUs to ask Slurm for; add --slurm.gpus N, for each node"
            )
        return asked
    wanted = gpu_ids if isinstance(gpu_ids, list) else [gpu_ids]
    count = 0 if wanted == [-1] else len(wanted)
    if typed and asked not in (None, count):
        raise UserError(f"--gpu_ids has {count} GPU(s) per node, but --slurm.gpus is {asked}; leave one of them out")
    return count if asked is None else asked


def frozen(values: Mapping[str, Any], folder: RunPaths, project: Path, gpus: int, task: int | None) -> dict[str, Any]:
    """A config's values for the copy of the code: paths that lead elsewhere are made absolute.

    Args:
        folder: of the run; for a task of an array, the one that holds those of all tasks.
    """
    places = {
        "expr_dir": folder.root.parent if task is None else folder.root,
        "data_dir": project / Path(values["dir"]["data_dir"] or "data").expanduser(),
    }
    files = code_files(project, _not_code(folder, places["data_dir"], project))
    copied = {part for name in files for part in (name, *name.parents)}

    def absolute(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: absolute(item) for name, item in value.items()}
        if isinstance(value, list):
            return [absolute(item) for item in value]
        if not isinstance(value, str) or "/" not in value or "\0" in value or len(value) > 1000:
            return value
        path = Path(os.path.normpath(Path(value).expanduser()))
        elsewhere = not path.is_absolute() and path not in copied and (project / path).exists()
        return str(project / path) if elsewhere else value

    result = {name: absolute(value) for name, value in values.items()}
    result["dir"] |= {name: str(place) for name, place in places.items()}
    if eval_dir := values["dir"]["eval_dir"]:
        result["dir"]["eval_dir"] = str(project / Path(eval_dir).expanduser())
    if task is not None:
        result["name"] = f"task_{task}"
    result["gpu_ids"] = list(range(gpus)) if gpus else -1
    result["dist"] = {**result["dist"], "processes": None, "launcher": "auto"}  # srun starts them
    result["resume"] = result["resume"] or "auto"  # the job itself may be started several times
    return result


def continues_in_place(resume: str | None, start_epoch: int, folder: RunPaths) -> bool:
    """Whether a run continues in the folder where it began.

    Raises:
        UserError: a new run is to begin with weights of the run whose folder it would take.
    """
    in_place = folder.contains(resume)
    if in_place and start_epoch == 0:
        raise UserError("progress.start_epoch 0 begins a new run; give it another --name than the one it starts from")
    return in_place


def prepare(
    folder: RunPaths, configs: Mapping[int | None, Mapping[str, Any]], project: Path, *, keep: bool
) -> tuple[str, Path | None]:
    """Make the run's folder ready to be queued: code and configurations in it, an earlier run out of the way.

    Args:
        configs: frozen values by task; one entry, for None, when there is no array.
        keep: continue in the folder instead of moving it away.

    Returns:
        What follows "config" and "job" in the names of this submission's files: "" the first time, "-2", "-3", ...;
        and where the earlier run is now, None if there was none.

    Raises:
        UserError: a job of this run is queued or running, or the folder cannot be written.
    """
    moved: Path | None = None
    try:
        folder.root.parent.mkdir(exist_ok=True)
        with alone_in(folder.root.parent):
            check_unused(folder)
            if folder.root.is_dir() and not keep:
                for values in configs.values():
                    check_stays({"init_from.path": values["init_from"]["path"]}, folder, project)
                moved = _clear(folder)
            slurm = folder.root / "slurm"
            slurm.mkdir(parents=True, exist_ok=True)
            suffix = _next_suffix(slurm)
            data_dir = Path(next(iter(configs.values()))["dir"]["data_dir"])
            snapshot(project, folder.root / "code", _not_code(folder, data_dir, project))
            for task, values in configs.items():
                file = slurm / (f"config{suffix}.yaml" if task is None else f"config{suffix}_{task}.yaml")
                write_text(file, f"# Frozen when the run {folder.name!r} was submitted.\n{dump(dict(values))}")
    except BaseException as error:
        if moved is not None:  # nothing will be queued
            shutil.rmtree(folder.root, ignore_errors=True)
            moved.rename(folder.root)
            logger.info("the earlier run is {} again", folder.root)
        if not isinstance(error, OSError):
            raise
        place = f"the run's folder {folder.root} cannot be written"
        raise UserError(f"{place}: {error}; choose another place with --dir.expr_dir") from error
    return suffix, moved


def _not_code(folder: RunPaths, data_dir: Path, project: Path) -> list[Path]:
    return [folder.root.parent, data_dir, project / "experiments", project / "data"]


def _clear(folder: RunPaths) -> Path | None:
    """Move an earlier run away, and say where to; what a submission left that never became a job is removed."""
    entries = {path.name for path in folder.root.iterdir()}
    if entries <= {"code", "slurm"} and not (folder.root / "slurm" / "jobs").exists():
        shutil.rmtree(folder.root)
        return None
    return archive(folder)


def _next_suffix(slurm: Path) -> str:
    number, suffix = 1, ""
    while any(slurm.glob(f"config{suffix}[._]*")):
        number += 1
        suffix = f"-{number}"
    return suffix


def check_unused(folder: RunPaths) -> None:
    """Refuse a folder that a job or process uses, or will.

    Raises:
        UserError: with the job or process, and how to stop it.
    """
    jobs = folder.root / "slurm" / "jobs"
    for job in jobs.read_text().split()[-1:] if jobs.exists() else ():  # the last: those before it had ended
        if state := _queue_state(job):
            raise UserError(
                f"{folder.root} belongs to job {job}, which is {state}; wait for it, stop it (scancel {job}),"
                " or give this run another --name"
            )
    for run in (folder, *map(RunPaths, folder.root.glob("task_*"))):
        check_free(run.lock_file)


def _queue_state(job: str) -> str | None:
    """RUNNING, PENDING, ...; "" when the job has ended; None where there is no Slurm to ask."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--format=%T", f"--jobs={job}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise UserError("squeue does not answer, so an earlier job of this run may be queued; try again") from error
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise UserError(f"squeue failed, so an earlier job of this run may be queued: {done.stderr.strip()}")
    return " and ".join(sorted(set(done.stdout.split())))
