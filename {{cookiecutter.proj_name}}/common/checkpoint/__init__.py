"""Checkpoints: a mapping of named parts in one atomic file, and what resuming from one means.

`file` reads and writes one, `folder` keeps those of a run, `saver` writes beside training, `state` lists what a run
consists of, `weights` fills models, `guarantee` says how exact a resume is.
`python -m common.checkpoint FILE` shows what is in one.
"""

from common.checkpoint.file import CheckpointError, read_checkpoint, write_checkpoint
from common.checkpoint.folder import CheckpointFolder, LoadedCheckpoint, find_checkpoint
from common.checkpoint.saver import CheckpointConfig, Saver
from common.checkpoint.weights import InitConfig, init_weights, load_weights

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointFolder",
    "InitConfig",
    "LoadedCheckpoint",
    "Saver",
    "find_checkpoint",
    "init_weights",
    "load_weights",
    "read_checkpoint",
    "write_checkpoint",
]
