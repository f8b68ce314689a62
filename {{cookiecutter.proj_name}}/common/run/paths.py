"""Paths of run folders, and of the files in them. Nothing here writes to disk."""

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from common.base.errors import UserError
from common.base.files import PROJECT as PROJECT
from common.config import section
from common.config.problem import shown_path


@section
class DirConfig:
    """Folders. A relative path starts at the project's root, wherever the command is given."""

    runs_dir: str | None = None
    """parent of all run folders; null: <project>/experiments"""
    data_dir: str | None = None
    """parent of all datasets; null: <project>/data"""
    eval_dir: str | None = None
    """where evaluate.py writes; null: <run>/eval/<checkpoint's name>"""


def data_dir(named: str | None, project: Path) -> Path:
    """Return the parent folder of all datasets; `named`: the key dir.data_dir."""
    return project / Path(named or "data").expanduser()


class RunPaths:
    """The paths of one run. Creating it does not touch the disk, and gives the same paths on every process.

    Attributes:
        config_file: the complete configuration, for `--config`.
        record_file: `{"name": ..., "attempts": [...]}`, one entry per start or resume, see `record.describe_start`.
        job_file: repeats the run: `sh job.sh`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = root.name
        self.checkpoints = root / "checkpoints"
        self.eval = root / "eval"
        self.config_file = root / "config.yaml"
        self.record_file = root / "run.json"
        self.job_file = root / "job.sh"
        self.metrics_file = root / "metrics.jsonl"
        self.status_file = root / "status.json"
        self.lock_file = root / "run.lock"

    @classmethod
    def for_run(cls, config: DirConfig, name: str, project: Path) -> "RunPaths":
        """Return the folder of the run `name`.

        Raises:
            UserError: `name` is not a valid folder name.
        """
        is_special = not name.strip() or name in (".", "..") or name.startswith("-")
        if is_special or re.search(r"[/\\\x00-\x1f]", name):
            raise UserError(
                f"name: {name!r} cannot name a folder: it must not be empty, '.' or '..', begin with '-',"
                f" or hold a slash or a control character; to put runs elsewhere use --dir.runs_dir"
            )
        return cls(project / Path(config.runs_dir or "experiments").expanduser() / name)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunPaths":
        """Return the run folder of a checkpoint; the file's own folder if it was moved out of a run."""
        folder = checkpoint.resolve().parent
        if folder.name == "checkpoints":
            folder = folder.parent
        return cls(folder)

    def holds_run(self) -> bool:
        """Return whether a run has written there."""
        return self.record_file.exists() or self.checkpoints.exists()

    def contains(self, path: str | Path | None) -> bool:
        """Return whether a path is in this folder: true for `auto` (of the option `resume`), false for None."""
        if path is None:
            return False
        if path == "auto":
            return True
        whole = Path(os.path.expanduser(path)).resolve()
        return whole.is_relative_to(self.root.resolve())

    def resume_command(self, program: str) -> str:
        """Return how to continue the run; empty if it has saved nothing."""
        with suppress(OSError):
            if any(self.checkpoints.glob("*.pt")):
                return shlex.join(["python", shown_path(program), "--resume", shown_path(self.root)])
        return ""

    def log_file(self, rank: int = 0) -> Path:
        if rank == 0:
            return self.root / "train.log"
        return self.root / f"train.rank{rank}.log"
