"""The results of an evaluation."""

from dataclasses import dataclass, field

from common.monitor.pictures import Picture


@dataclass(frozen=True)
class SetResult:
    """The outcome of one pass over one set.

    Attributes:
        values: `loss` (the weighted sum), each metric, and each further loss by name; the same on every process.
        samples: samples seen, over all processes.
        pictures: of the samples that the task's gallery chooses; in the main process only.
    """

    values: dict[str, float]
    samples: int
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class SplitResult:
    """The results on a split, one per set by name; a single set is called ""."""

    sets: dict[str, SetResult]

    @property
    def values(self) -> dict[str, float]:
        """All values: `loss`, or `name.loss` of a set with a name."""
        rows = ((name, key, value) for name, measured in self.sets.items() for key, value in measured.values.items())
        return {f"{name}.{key}" if name else key: value for name, key, value in rows}

    @property
    def samples(self) -> int | dict[str, int]:
        """Samples seen; per set if sets have names."""
        counts = {name: measured.samples for name, measured in self.sets.items()}
        return counts.get("", counts)
