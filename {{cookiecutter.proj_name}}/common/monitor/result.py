"""The results of an evaluation."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Picture:
    """A picture of a sample, as a task gives it.

    Attributes:
        image: (H, W) or (H, W, 1, 3 or 4), floats from 0 to 1 or integers to 255.
        text: one or more lines, to be shown below it.
        ok: whether the prediction is right; None: unknown.
    """

    image: ArrayLike
    text: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class SetResult:
    """The outcome of one pass over one set.

    Attributes:
        values: `loss` (the weighted sum), each metric, and each further loss by name; the same on every process.
        samples: samples seen, over all processes.
        pictures: (H, W, 3) each, of the samples that were chosen; in the main process only.
    """

    values: dict[str, float]
    samples: int
    pictures: list[NDArray[np.uint8]] = field(default_factory=list)


@dataclass(frozen=True)
class SplitResult:
    """The results on a split, one per set by name; a single set is called ""."""

    sets: dict[str, SetResult]

    @property
    def values(self) -> dict[str, float]:
        """All values: `loss`, or `name.loss` of a set with a name."""
        values = {}
        for name, measured in self.sets.items():
            for key, value in measured.values.items():
                values[f"{name}.{key}".removeprefix(".")] = value
        return values

    @property
    def samples(self) -> int | dict[str, int]:
        """Samples seen; per set if sets have names."""
        counts = {name: measured.samples for name, measured in self.sets.items()}
        return counts.get("", counts)
