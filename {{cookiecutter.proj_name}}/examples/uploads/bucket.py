"""Copies checkpoints to a bucket, or another place that fsspec can write to: s3://, gs://, az://, sftp://, webhdfs://."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from fsspec.core import url_to_fs
from loguru import logger

from common.checkpoint.after_save import Saved


def upload(saved: Saved, to: str, names: Sequence[str] = ("latest.pt", "best.pt"), **options: Any) -> None:
    """Copy the file to `<to>/<name of the run>/`, where it replaces the one before.

    Args:
        saved: supplied by the engine.
        to: address of a folder.
        names: patterns of the files to copy, as in `step_*.pt`.
        options: of the file system, as in `profile` of s3fs. Without them it finds your keys where it always does.
    """
    if not any(fnmatchcase(saved.name, pattern) for pattern in names):
        return
    files, folder = url_to_fs(f"{to}/{saved.run.name}", **options)
    files.makedirs(folder, exist_ok=True)
    files.put_file(str(saved.path), f"{folder}/{saved.name}")
    logger.info("copied {} of step {} to {}/{}", saved.name, saved.step, to, saved.run.name)
