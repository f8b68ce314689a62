"""The seat `gallery` of evaluations: it draws samples. Without a part that takes it, nothing is drawn."""

from pathlib import Path
from typing import Any, Protocol

from common.base.parts import part
from common.distributed import Rank
from common.monitor.result import SplitResult


class Gallery(Protocol):
    """What evaluations call.

    `begin` gives what collects the pictures of one pass over a set: `add(output, batch, indices)` after each batch, and
    `finish()` on every process. `fixed`: the same samples are to be shown in every pass.
    """

    def begin(self, task: Any, rank: Rank, *, fixed: bool = False) -> Any: ...

    def show(self, trainer: Any, split: str, result: SplitResult) -> None: ...

    def save(self, folder: Path, result: SplitResult) -> None: ...


def build_gallery(config: Any) -> Gallery | None:
    """Fill the seat: with parts/pictures, if this project has it and its config asks for pictures."""
    pictures = part("pictures", "gallery")
    if pictures is None:
        return None
    gallery: Gallery | None = pictures.build(config)
    return gallery
