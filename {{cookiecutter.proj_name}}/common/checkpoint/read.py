"""A checkpoint, in one file or with shards beside it, back to memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.checkpoint.file import read_file
from common.checkpoint.shards import check_shards, gathered


def read_checkpoint(path: Path, *, whole: bool = True, parts: Sequence[str] | None = None) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Everything is verified, the shards of a sharded one too.

    Args:
        whole: put a sharded one together; false leaves references in the places of its tensors.
        parts: of a sharded one, the entries that are wanted; None: all.

    Raises:
        CheckpointError: it is missing, damaged (truncated, a flipped bit), or not a checkpoint of this project.
    """
    state = read_file(path)
    check_shards(state, path)
    return dict(gathered(state, path, parts=parts)) if whole else state
