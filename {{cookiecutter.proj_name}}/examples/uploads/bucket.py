"""Copies checkpoints to a bucket, or another place that fsspec can write to: s3://, gs://, az://, sftp://, webhdfs://."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from fsspec.core import url_to_fs
from loguru import logger

from parts.after_save.calls import Saved


class Upload:
    """Copies files to `<to>/<name of the run>/`, where each replaces the one before.

    Args:
        to: address of a folder. A package that it needs, such as s3fs, is missed before training starts.
        names: patterns of the files to copy, as in `step_*.pt`.
        options: of the file system, as in `profile` of s3fs. Without them it finds your keys where it always does.
    """

    def __init__(self, to: str, names: Sequence[str] = ("latest.pt", "best.pt"), **options: Any) -> None:
        self.files, self.folder = url_to_fs(to, **options)
        self.to, self.names = to, names

    def __call__(self, saved: Saved) -> None:
        """Copy one file, if its name fits a pattern."""
        if any(fnmatchcase(saved.name, pattern) for pattern in self.names):
            self.files.makedirs(f"{self.folder}/{saved.run.name}", exist_ok=True)
            self.files.put_file(str(saved.path), f"{self.folder}/{saved.run.name}/{saved.name}")
            logger.info("copied {} of step {} to {}/{}", saved.name, saved.step, self.to, saved.run.name)
