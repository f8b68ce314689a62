"""Where a run lies, and what in its folder lies where. Only paths: nothing in here writes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.base.errors import UserError
from common.config import section


@section
class DirConfig:
    """Folders. A relative path starts at the project's root, wherever the command is given."""

    expr_dir: Annotated[str | None, Field(description="parent of all run folders; null: <project>/experiments")] = None
    data_dir: Annotated[str | None, Field(description="parent of all data sets; null: <project>/data")] = None
    eval_dir: Annotated[
        str | None, Field(description="where evaluate.py writes; null: <run>/eval/<checkpoint's name>")
    ] = None


def data_dir(config: DirConfig, project: Path) -> Path:
    """The parent folder of all data sets."""
    return _below(project, config.data_dir, "data")


def eval_dir(config: DirConfig, checkpoint: Path, split: str, project: Path) -> Path:
    """Where the evaluation of `checkpoint` on a split is written; splits other than eval get a folder of their own."""
    if config.eval_dir is not None:
        return _below(project, config.eval_dir, "")
    return RunPaths.of_checkpoint(checkpoint).eval / (
        checkpoint.stem if split == "eval" else f"{checkpoint.stem}_{split}"
    )


def _below(project: Path, path: str | None, default: str) -> Path:
    return project / (default if path is None else Path(path).expanduser())


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run. Only paths: making one touches no disk and gives the same on every process."""

    root: Path

    @classmethod
    def for_run(cls, config: DirConfig, name: str, project: Path) -> "RunPaths":
        """The folder of the run `name`.

        Raises:
            UserError: `name` cannot be the name of a folder.
        """
        if not name.strip() or name in (".", "..") or name[0] == "-" or re.search(r"[/\\\x00-\x1f]", name):
            raise UserError(
                f"name: {name!r} cannot name a folder: it must not be empty, '.' or '..', begin with '-',"
                f" or hold a slash or a control character; to put runs elsewhere use --dir.expr_dir"
            )
        if (size := len(name.encode(errors="surrogateescape"))) > 200:
            raise UserError(f"name: {name[:20]!r}... takes {size} bytes; shorten it to at most 200")
        return cls(_below(project, config.expr_dir, "experiments") / name)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunPaths":
        """The run folder that a checkpoint file lies in; its own folder when it was moved out of one."""
        folder = checkpoint.resolve().parent
        return cls(folder.parent if folder.name == "checkpoints" else folder)

    def contains(self, resume: str | None) -> bool:
        """Whether what the option `resume` names is in this folder."""
        if resume is None:
            return False
        return resume == "auto" or Path(resume).expanduser().resolve().is_relative_to(self.root.resolve())

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def event(self) -> Path:
        """TensorBoard's files."""
        return self.root / "event"

    @property
    def progress(self) -> Path:
        """Pictures, when `progress.local_progress` is on."""
        return self.root / "progress"

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    @property
    def config_file(self) -> Path:
        """The complete configuration; `--config` takes it."""
        return self.root / "config.yaml"

    @property
    def record_file(self) -> Path:
        """`{"name": ..., "attempts": [...]}`, an entry for each start and resume, see `record.describe`."""
        return self.root / "run.json"

    @property
    def diff_file(self) -> Path:
        """Changes that were not committed at the first start."""
        return self.root / "git.diff"

    @property
    def job_file(self) -> Path:
        """Repeats the run: `sh job.sh`."""
        return self.root / "job.sh"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def status_file(self) -> Path:
        return self.root / "status.json"

    @property
    def lock_file(self) -> Path:
        return self.root / "run.lock"

    def log_file(self, rank: int = 0) -> Path:
        return self.root / ("train.log" if rank == 0 else f"train.rank{rank}.log")

    def error_file(self, rank: int) -> Path:
        """The traceback of the error that ended this rank, if one did."""
        return self.root / f"error_rank{rank}.txt"
