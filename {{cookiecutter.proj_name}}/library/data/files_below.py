"""The files below a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from common.base.errors import UserError


def files_below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, in the order of their names, those of linked folders too, but no hidden ones.

    A link to a folder above it is left out, with a warning, and so is a folder that cannot be read.

    Args:
        above: the folders that contain this one, without links.

    Raises:
        UserError: a link is broken.
    """
    here = os.path.realpath(folder)
    if here in above:
        logger.warning("{} is a link to a folder above it, and left out", folder)
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        logger.warning("{} cannot be read ({}), and is left out", folder, error.strerror)
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from files_below(Path(entry.path), (*above, here))
        elif entry.is_file():
            yield Path(entry.path)
        elif entry.is_symlink():
            remedy = "restore what it points to (dvc pull, git annex get, mount), or remove it"
            raise UserError(f"{entry.path} is a broken link: {remedy}")
