"""A copy of the project's code, so later edits do not change queued jobs."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import asdict
from json import dumps
from pathlib import Path

from common.base.errors import UserError
from common.base.files import write_text
from common.run.record import SNAPSHOT, git_files, git_state

MAX_SNAPSHOT_MB = 500  # more than that is not code, and each submission copies it
_NO_CODE = re.compile(r"\.git|__pycache__|\..*_cache|\.ipynb_checkpoints|node_modules|.*\.egg-info")


def snapshot(project: Path, target: Path, leave_out: Collection[Path]) -> None:
    """Copy the code of `project` to the folder `target`, with the state of its repository.

    Args:
        leave_out: folders of runs and of data, which may lie in the project.

    Raises:
        UserError: it is too large to be code.
    """
    sizes = {name: (project / name).lstat().st_size / 2**20 for name in code_files(project, leave_out)}
    if sum(sizes.values()) > MAX_SNAPSHOT_MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"the code in {project} has {sum(sizes.values()):,.0f} MB, and every job gets a copy; the limit is"
            f" {MAX_SNAPSHOT_MB} MB. The largest file is {largest} ({sizes[largest]:,.0f} MB); move such files to"
            " data/, or name them in .gitignore"
        )
    for name in sizes:
        source, copy = project / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() and not source.resolve().is_relative_to(project.resolve()):
            copy.symlink_to(source.resolve())  # points to the same place from the copy
        else:
            shutil.copy2(source, copy, follow_symlinks=False)
    write_text(target / SNAPSHOT, dumps(asdict(git_state(project)), indent=1) + "\n")


def code_files(project: Path, leave_out: Collection[Path]) -> list[Path]:
    """Files of the project's code, relative to it: those not ignored by git, and everything in its packages.

    .gitignore may match code by mistake, and matches compiled files on purpose: packages are copied despite it.
    Without git: everything except caches and virtual environments. Nothing below a folder of `leave_out` is included.
    """
    try:
        known = {project / name for name in git_files(project, "--cached", "--others")}
    except (OSError, subprocess.SubprocessError):
        known = set()
    folders = [project]
    if project / "train.py" in known:  # otherwise an enclosing repository ignores this folder
        inner_repositories = [path for path in known if path.is_dir() and not path.is_symlink()]
        folders = [*(init.parent for init in project.glob("*/__init__.py")), *inner_repositories]
    known.update(path for folder in folders for path in _walk(folder, leave_out))
    return sorted(
        path.relative_to(project)
        for path in known
        if (path.is_file() or path.is_symlink()) and not any(path.is_relative_to(folder) for folder in leave_out)
    )


def _walk(folder: Path, leave_out: Collection[Path]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        paths = [Path(parent, name) for name in folders if not _NO_CODE.fullmatch(name)]
        paths = [path for path in paths if path not in leave_out and not (path / "pyvenv.cfg").exists()]
        folders[:] = [path.name for path in paths]
        yield from (path for path in paths if path.is_symlink())
        yield from (Path(parent, name) for name in files)
