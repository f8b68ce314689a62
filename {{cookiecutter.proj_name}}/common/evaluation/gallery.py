"""Which samples of a set are drawn."""

from collections.abc import Sequence
from typing import Any, Protocol

from common.distributed import Rank
from common.monitor.pictures import Picture


class DrawsPictures(Protocol):
    """A task, as far as a gallery needs it."""

    def pictures(self, output: Any, batch: Any, limit: int) -> list[Picture]:
        """Up to `limit` pictures of a batch after `post_process`."""
        ...


class Gallery:
    """Collects the pictures of one pass over a set: those of the main process' first samples.

    A task names its class, `Task.gallery`; one that draws other samples derives from it.

    Args:
        limit: the most pictures.
        fixed: the same samples are to be shown in every pass, so that progress is seen.
    """

    def __init__(self, task: DrawsPictures, rank: Rank, limit: int, *, fixed: bool = False) -> None:
        self.task, self.rank, self.limit, self.fixed = task, rank, limit, fixed
        self.pictures: list[Picture] = []

    def add(self, output: Any, batch: Any, indices: Sequence[int] | None = None) -> None:
        """Consider a batch after `post_process`. `indices`: of its samples in the data set; None: unknown."""
        if self.rank.is_main and len(self.pictures) < self.limit:
            self.pictures += self.task.pictures(output, batch, self.limit - len(self.pictures))

    def finish(self) -> list[Picture]:
        """The pictures, on the main process. Every process of `rank` must call this."""
        return self.pictures
