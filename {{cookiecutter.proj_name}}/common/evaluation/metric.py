"""Metrics: counted sample by sample, or computed from what every sample gave; over all ranks, once at the end."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from loguru import logger
from typing_extensions import Self

from common.base.errors import UserError
from common.config import ABSENT, Problem
from common.config.registry import METRIC_REGISTRY
from common.distributed import Rank, from_main, gather_objects
from common.evaluation.best import Better
from common.evaluation.gathered import Results, SampleBuffer

Value = float | dict[str, float]
"""One number, or several by name."""

_LARGE_BYTES = 2**30


class Metric(ABC):
    """A number, or several, about a whole data set that can be counted batch by batch. Never keep means of means.

    An object starts empty, sees every batch of one process, takes in the objects of the other processes, and computes.
    It travels between processes, so its attributes are numbers, lists and CPU tensors. Count in whole numbers, and keep
    floats in a `common.evaluation.exact.ExactSum`: then the value does not depend on the number of processes.
    """

    higher_is_better: ClassVar[Better] = None
    """What `best.mode: auto` goes by: of the value, or of each value by its name."""

    @abstractmethod
    def update(self, output: Any, batch: Any) -> None:
        """Take in one batch: what the task's post-processing gave, and what the data set gave."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take in what another process saw, which may be nothing."""

    @abstractmethod
    def compute(self) -> Value:
        """The value(s) over everything seen; at least one sample was."""


class GatheredMetric(ABC):
    """A number, or several, that only all samples together give: an area under a curve, a ranking.

    The object itself keeps nothing. What `results` gives for each batch is kept on the CPU; at the end all of it is
    brought to the main process, each sample once, in the order of the data set, and `compute` runs there, once.
    """

    higher_is_better: ClassVar[Better] = None
    """What `best.mode: auto` goes by: of the value, or of each value by its name."""

    @abstractmethod
    def results(self, output: Any, batch: Any) -> Results:
        """What `compute` needs of a batch, by name: tensors with the samples as first dimension, or lists of one entry
        per sample where sizes differ. Keep it small: it is held for every sample of the data set."""

    @abstractmethod
    def compute(self, results: Results) -> Value:
        """The value(s) from the results of all samples."""


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


def check_names(metrics: Iterable[str], losses: Container[str]) -> Iterator[Problem]:
    """Each metric that is called like a loss, whose value it would replace in every record."""
    for metric in metrics:
        if metric in losses:
            rule = f"there is a loss.{metric} too, and only one of the two values could be kept"
            hint = "call one of them something else and name its type, as in my_name: {type: ...}"
            yield Problem(f"metric.{metric}", ABSENT, rule, hint)


def which_are_better(sections: Mapping[str, Any]) -> dict[str, Better]:
    """What the class of each metric says. Nothing of a class that cannot be found, which `MetricSections` reports."""
    found: dict[str, Better] = {}
    for name, section in sections.items():
        kind = section.get("type", name) if isinstance(section, Mapping) else name
        try:
            says = getattr(METRIC_REGISTRY.get(str(kind)), "higher_is_better", None)
        except UserError:
            says = None
        found[name] = says if isinstance(says, (bool, Mapping)) else None
    return found


class MetricFactory:
    """The configured metrics, empty."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._empty: dict[str, Metric | GatheredMetric] = {}
        self._has_warned = False
        for name, section in sections.items():
            metric = METRIC_REGISTRY.build({"type": name, **(section or {})})
            if not isinstance(metric, (Metric, GatheredMetric)):
                kind = type(metric).__name__
                raise UserError(
                    f"metric.{name}: {kind} derives from neither Metric nor GatheredMetric (common.evaluation.metric)"
                )
            self._empty[name] = metric

    def start(self) -> "MetricDict":
        """Empty metrics for one pass over a data set."""
        return MetricDict(copy.deepcopy(self._empty), self.warn_if_large)

    def warn_if_large(self, size: int) -> None:
        """Warn, once in a run, when many bytes of results are gathered."""
        if size > _LARGE_BYTES and not self._has_warned:
            self._has_warned = True
            logger.warning("whole-set metrics gather {:.1f} GB of results in the main process", size / 2**30)


class MetricDict:
    """The metrics of one pass."""

    def __init__(self, metrics: Mapping[str, Metric | GatheredMetric], warn_if_large: Callable[[int], None]) -> None:
        self._names = list(metrics)
        self._counted = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
        self._whole = {name: metric for name, metric in metrics.items() if isinstance(metric, GatheredMetric)}
        self._buffers = {name: SampleBuffer(name) for name in self._whole}
        self._warn_if_large = warn_if_large

    def update(self, output: Any, batch: Any, first: int) -> None:
        """Take in a batch, which begins with the sample `first` of the data set."""
        for counted in self._counted.values():
            counted.update(output, batch)
        for name, whole in self._whole.items():
            self._buffers[name].add(whole.results(output, batch), first)

    def compute(self, rank: Rank) -> dict[str, float]:
        """Values over all processes, the same on each of them: `name`, or `name.part` for a metric of several."""
        sizes = sum(buffer.bytes for buffer in self._buffers.values())
        (merged, size), *others = gather_objects((self._counted, sizes), rank)
        for counted, more in others:  # in rank order on every process, so that all add up alike
            size += more
            for name, metric in merged.items():
                metric.merge(counted[name])
        values = {name: _named(name, metric.compute()) for name, metric in merged.items()}
        if self._whole:
            if rank.is_main:
                self._warn_if_large(size)
            values |= self._compute_whole(rank)
        return {key: number for name in self._names for key, number in values[name].items()}

    def _compute_whole(self, rank: Rank) -> dict[str, dict[str, float]]:
        values = {}
        for name, whole in self._whole.items():
            results = self._buffers.pop(name).gather(rank)  # held no longer than needed
            if rank.is_main:
                values[name] = _named(name, whole.compute(results))
        return from_main(values, rank)


def _named(name: str, value: Value) -> dict[str, float]:
    if isinstance(value, dict):
        return {f"{name}.{part}": float(number) for part, number in value.items()}
    return {name: float(value)}
