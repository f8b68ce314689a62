"""Metrics: accumulated batch by batch, or computed from the results of all samples; over all ranks, once at the end."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from typing_extensions import Self

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.config import Problem
from common.config.arguments import check_arguments
from common.config.registry import METRIC_REGISTRY
from common.config.schema import EditorRule
from common.distributed import Rank, from_main, gather_objects, gather_to_main
from common.evaluation.loss import Inputs, Term, by_part, look_up
from common.monitor.pictures import Pixels, to_rgb

_OWN = ("inputs",)  # keys of a metric's section that are read here; all others are its arguments

Better = bool | Mapping[str, bool] | None
"""Whether higher values are better, for one value or for each by name; None if unknown."""
Results = dict[str, Any]
"""Results by name, one entry per sample: a tensor with the samples as first dimension, or a list."""
Value = float | dict[str, float]
"""One number, or several by name."""


class Metric(ABC):
    """A value, or several, over a dataset that can be accumulated batch by batch. Never average means of batches.

    An object starts empty, sees every batch of one process, merges the objects of the other processes, and computes.
    It is sent between processes, so its attributes are numbers, lists and CPU tensors. Count in integers, and keep
    floats in a list that `compute` adds with `math.fsum`: then the value does not depend on the number of processes.

    Attributes:
        higher_is_better: for `best.mode: auto`: whether higher is better, for the value or for each value by name.
    """

    higher_is_better: ClassVar[Better] = None

    @abstractmethod
    def update(self, output: Any, batch: Any) -> None:
        """Add one batch: the output of the task's post-processing, and the batch from the dataset."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add the object of another process, which may be empty."""

    @abstractmethod
    def compute(self) -> Value:
        """Return the value(s) over everything seen, at least one sample."""

    def figure(self, classes: Sequence[str]) -> ArrayLike | None:
        """Return a picture of everything seen, as in `to_rgb`, or None. `classes`: their names, empty if unknown."""
        return None


class GatheredMetric(ABC):
    """A value, or several, that needs all samples together: an area under a curve, a ranking.

    The object itself keeps nothing. The `results` of each batch are kept on the CPU; at the end they are gathered on
    the main process, each sample once, in the order of the dataset, and `compute` runs there, once.

    Attributes:
        higher_is_better: for `best.mode: auto`: whether higher is better, for the value or for each value by name.
    """

    higher_is_better: ClassVar[Better] = None

    @abstractmethod
    def results(self, output: Any, batch: Any) -> Results:
        """Results of a batch that `compute` needs, by name: tensors with the samples as first dimension, or lists of
        one entry per sample where sizes differ. Keep it small: it is held for every sample of the dataset."""

    @abstractmethod
    def compute(self, results: Results) -> Value:
        """Return the value(s) from the results of all samples."""

    def figure(self, results: Results, classes: Sequence[str]) -> ArrayLike | None:
        """Return a picture of the results, as in `to_rgb`, or None. `classes`: their names, empty if unknown."""
        return None


class MetricSections(EditorRule):
    """Checks a section that maps names to metrics: `{Accuracy: null, top3: {type: Accuracy, k: 3}}`."""

    def editor_rule(self) -> dict[str, Any]:
        """Return a section for each name."""
        return {"additionalProperties": METRIC_REGISTRY.editor_rule(inputs={"type": ["object", "null"]})}

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if not isinstance(value, Mapping):
            yield Problem(key, value, "must map names to metrics; {} for none")
            return
        for name, section in value.items():
            below, section = f"{key}.{name}", section or {}
            yield from METRIC_REGISTRY.check(section, below, ignore=_OWN, default_type=name)
            settings = {word: section[word] for word in _OWN if isinstance(section, Mapping) and word in section}
            yield from check_arguments(Term, settings, below, lambda: "every metric", provided=("name", "function"))


class MetricFactory:
    """The configured metrics, empty.

    With `inputs: {label: batch.labels}` a metric finds `label` in the output and in the batch: the value at that path.
    """

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._empty: dict[str, Metric | GatheredMetric] = {}
        self._inputs = {name: section["inputs"] for name, section in sections.items() if (section or {}).get("inputs")}
        for name, section in sections.items():
            metric = METRIC_REGISTRY.build({"type": name, **(section or {})}, ignore=_OWN)
            if not isinstance(metric, (Metric, GatheredMetric)):
                kind = type(metric).__name__
                raise UserError(f"metric.{name}: {kind} derives from neither Metric nor GatheredMetric")
            self._empty[name] = metric

    def start(self) -> "MetricDict":
        """Empty metrics for one pass over a dataset."""
        return MetricDict(copy.deepcopy(self._empty), self._inputs)


class MetricDict:
    """The metrics of one pass."""

    def __init__(self, metrics: Mapping[str, Metric | GatheredMetric], inputs: Mapping[str, Inputs]) -> None:
        self._metrics, self._inputs = metrics, inputs
        self.figures: dict[str, Pixels] = {}  # by name; found by `compute`, in the main process
        self._buffers = {name: SampleBuffer(name) for name in metrics}

    def update(self, output: Any, batch: Any, indices: Sequence[int]) -> None:
        """Add a batch of the samples `indices` of the dataset."""
        for name, metric in self._metrics.items():
            seen = [output, batch]
            if name in self._inputs:
                value = look_up(self._inputs[name], output, batch, f"metric.{name}")
                # Parts that `inputs` does not name stay as they are, so one name that differs is one line.
                seen = [{**part, **value} if isinstance(part, Mapping) else value for part in seen]
            if isinstance(metric, Metric):
                metric.update(*seen)
            else:
                self._buffers[name].add(metric.results(*seen), indices)

    def compute(self, rank: Rank, classes: Sequence[str] | None = None) -> dict[str, float]:
        """Values over all processes, the same on each of them: `name`, or `name.part` for a metric with several.

        `classes`: their names, for figures; None: no figures.
        """
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if isinstance(metric, Metric):
                merged, *others = gather_objects(metric, rank)
                for other in others:  # in rank order on every process, so the sums are the same
                    merged.merge(other)
                value, draw = merged.compute(), merged.figure
            else:
                results = self._buffers.pop(name).gather(rank)  # held no longer than needed
                value = from_main(metric.compute(results) if rank.is_main else 0.0, rank)
                draw = partial(metric.figure, results)
            values |= {key: float(number) for key, number in by_part(name, value).items()}
            if rank.is_main and classes is not None and (figure := draw(classes)) is not None:
                self.figures[name] = to_rgb(figure)
        return values


class SampleBuffer:
    """Results of one metric for the samples of this process, until they are gathered."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._batches: list[tuple[int, Results]] = []  # of each batch, its first sample and its results

    def add(self, results: Results, indices: Sequence[int]) -> None:
        """Keep the metric's results for a batch of the samples `indices` of the dataset."""
        for name, value in results.items():
            if len(value) != len(indices):
                fault = f"{name} has {len(value)} for {len(indices)} samples"
                raise UserError(f"metric.{self._metric}: every result must have one entry per sample, but {fault}")
        # A copy on the CPU too: a worker's tensor keeps a file of shared memory open, and a view its whole base alive.
        on_cpu = map_tensors(results, lambda tensor: tensor.detach().to("cpu", copy=True))
        self._batches.append((indices[0], on_cpu))

    def gather(self, rank: Rank) -> Results:
        """Gather the results of all processes on the main one, in the order of the dataset; nothing on the others."""
        gathered = chain.from_iterable(gather_to_main(self._batches, rank))
        batches = [results for _, results in sorted(gathered, key=lambda batch: batch[0])]
        return {name: _join([results[name] for results in batches]) for name in batches[0]} if batches else {}


def _join(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain.from_iterable(parts))
