"""What the episodes of an epoch begin with: seeds."""

from pathlib import Path

import torch
from torch import Tensor


class Episodes:
    """A seed for each episode. The task plays it, with the weights that it has then.

    The loader seeds every sample by (seed, epoch, index), so an epoch's episodes are new, and the same after a resume
    and on any number of processes. Those of an evaluation are always the same.

    Args:
        episodes: per epoch.
    """

    random = True

    def __init__(self, data_dir: Path, mode: str, episodes: int) -> None:
        self.episodes = episodes

    def __len__(self) -> int:
        return self.episodes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`seed`, int64 scalar."""
        return {"seed": torch.randint(2**31, ())}
