"""A copy of the project's code, so that editing it changes no job that is queued."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from common.base.errors import UserError
from common.base.files import write_text
from common.run.git import SNAPSHOT, git_files, git_state

MAX_SNAPSHOT_MB = 500  # more cannot be code, and each submission copies it
_NO_CODE = re.compile(r"\.git|__pycache__|\..*_cache|\.ipynb_checkpoints|node_modules|.*\.egg-info")


def snapshot(project: Path, target: Path, leave_out: Sequence[Path]) -> None:
    """Copy the code of `project` to the folder `target`; what was there becomes `<target>_1`, `<target>_2`, ...

    Args:
        leave_out: folders of runs and of data, which may lie in the project.

    Raises:
        UserError: it is too large to be code.
    """
    files = list(code_files(project, leave_out))
    _check_size(project, files)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for name in files:
            (beside / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(project / name, beside / name, project)
        write_text(beside / SNAPSHOT, git_state(project).to_json())
        if target.exists():
            number = 1
            while (old := target.with_name(f"{target.name}_{number}")).exists():
                number += 1
            target.rename(old)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _copy(source: Path, target: Path, project: Path) -> None:
    """One file with its times and permissions; a link out of the project leads to the same place from its copy."""
    if source.is_symlink() and not source.resolve().is_relative_to(project.resolve()):
        target.symlink_to(source.resolve())
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def code_files(project: Path, leave_out: Sequence[Path]) -> Iterator[Path]:
    """What makes up the project's code, relative to it: all that git knows or does not ignore, and all that is in use.

    Without git it is everything but caches and virtual environments. Nothing below a folder of `leave_out` counts.
    """
    names = git_files(project)
    if "train.py" not in names:  # no git here, or a repository around us that ignores this folder
        names = [str(path.relative_to(project)) for path in _walk(project, leave_out)]
    # A pattern in .gitignore can hit code by mistake, and it hits what is compiled on purpose.
    for name in sorted({*names, *_imported(project)}):
        path = project / name
        if any(path.is_relative_to(folder) for folder in leave_out):
            continue
        if path.is_dir() and not path.is_symlink():  # a repository inside this one
            yield from (inside.relative_to(project) for inside in _walk(path, ()))
        elif path.is_symlink() or path.is_file():  # one that git knows may have been removed
            yield Path(name)


def _imported(project: Path) -> Iterator[str]:
    """The files in `project` that were imported to check the configuration, but not those of a virtual environment.

    Libraries of operators count, each with the record of its build beside it.
    """
    environments = [path.parent for path in project.glob("*/pyvenv.cfg")]
    files = [Path(getattr(module, "__file__", None) or "/") for module in list(sys.modules.values())]
    for library in map(Path, torch.ops.loaded_libraries):
        files += [library, library.with_suffix(".json")]
    for file in files:
        if file.is_relative_to(project) and not any(file.is_relative_to(place) for place in environments):
            yield str(file.relative_to(project))


def _walk(folder: Path, leave_out: Sequence[Path]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        folders[:] = [
            name
            for name in folders
            if not _NO_CODE.fullmatch(name)
            and here / name not in leave_out
            and not (here / name / "pyvenv.cfg").exists()
        ]
        links = [name for name in folders if (here / name).is_symlink()]
        yield from (here / name for name in [*files, *links])


def _check_size(project: Path, files: Sequence[Path]) -> None:
    sizes = {name: (project / name).lstat().st_size for name in files}
    if sum(sizes.values()) <= MAX_SNAPSHOT_MB * 2**20:
        return
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
    shown = ", ".join(f"{name} ({sizes[name] / 2**20:,.0f} MB)" for name in largest)
    raise UserError(
        f"the code in {project} has {sum(sizes.values()) / 2**20:,.0f} MB, and every job gets a copy; the limit is"
        f" {MAX_SNAPSHOT_MB} MB. The largest files: {shown}; move them to data/, or name them in .gitignore"
    )
