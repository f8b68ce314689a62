"""Metrics: counted sample by sample, over all ranks, and computed once at the end."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import Self

from common.config import Problem
from common.distributed import Rank, gather_objects
from common.errors import UserError
from common.registry import METRIC_REGISTRY


class Metric(ABC):
    """One number, or several, about a whole data set. Keep sums and counts, never means of means.

    An object starts empty, sees every batch of one process, takes in the objects of the other processes, and computes.
    It travels between processes, so its attributes are numbers, lists and CPU tensors.
    """

    @abstractmethod
    def update(self, output: Any, batch: Any) -> None:
        """Take in one batch: what the task's post-processing gave, and what the data set gave."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take in what another process saw."""

    @abstractmethod
    def compute(self) -> float | dict[str, float]:
        """The value(s) over everything seen; at least one sample was."""


class MetricSections:
    """Checks a section that maps names to metrics: `{Accuracy: null, top3: {type: Accuracy, k: 3}}`."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if not isinstance(value, Mapping):
            yield Problem(key, value, "must map names to metrics; {} for none")
            return
        for name, section in value.items():
            if name in ("loss", "sum", "names"):
                yield Problem(f"{key}.{name}", section, "is a name that the losses use; choose another one")
            yield from METRIC_REGISTRY.check(section or {}, f"{key}.{name}", default_type=name)


class MetricFactory:
    """The configured metrics, empty."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._empty: dict[str, Metric] = {}
        for name, section in sections.items():
            metric = METRIC_REGISTRY.build({"type": name, **(section or {})})
            if not isinstance(metric, Metric):
                raise UserError(f"metric.{name}: {type(metric).__name__} does not derive from common.metric.Metric")
            self._empty[name] = metric

    def start(self) -> "MetricDict":
        """Empty metrics for one pass over a data set."""
        return MetricDict(copy.deepcopy(self._empty))


class MetricDict:
    """The metrics of one pass."""

    def __init__(self, metrics: dict[str, Metric]) -> None:
        self.metrics = metrics

    def update(self, output: Any, batch: Any) -> None:
        for metric in self.metrics.values():
            metric.update(output, batch)

    def compute(self, rank: Rank) -> dict[str, float]:
        """Values over all processes, the same on each of them: `name`, or `name.part` for a metric of several."""
        first, *others = gather_objects(self.metrics, rank)
        values: dict[str, float] = {}
        for name, metric in first.items():
            for other in others:  # in rank order on every process, so that all add up alike
                metric.merge(other[name])
            value = metric.compute()
            if isinstance(value, dict):
                values.update({f"{name}.{part}": float(number) for part, number in value.items()})
            else:
                values[name] = float(value)
        return values
