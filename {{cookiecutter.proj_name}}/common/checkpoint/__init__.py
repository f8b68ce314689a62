"""Checkpoints: named parts of a run in one file, written atomically, and the guarantees of a resume.

`file` reads and writes one, `folder` keeps those of a run, `saver` writes in the background, `state` collects the
parts of a run, `weights` loads models, `fingerprint` collects and compares what decides the bits, `guarantee` says how
exact a resume is.
`python -m tools.checkpoint FILE` prints the contents of one.
"""

from common.checkpoint.file import CheckpointError, read_checkpoint, write_checkpoint
from common.checkpoint.folder import CheckpointFolder, LoadedCheckpoint, best_in, find_checkpoint
from common.checkpoint.saver import CheckpointConfig, Saver
from common.checkpoint.weights import InitConfig, init_weights, load_weights, weights_path

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointFolder",
    "InitConfig",
    "LoadedCheckpoint",
    "Saver",
    "best_in",
    "find_checkpoint",
    "init_weights",
    "load_weights",
    "read_checkpoint",
    "weights_path",
    "write_checkpoint",
]
