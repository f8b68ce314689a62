"""Metrics: accumulated batch by batch, or computed from the results of all samples; over all ranks, once at the end."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from common.base.errors import UserError, error_context
from common.base.nested import map_tensors
from common.config import Problem
from common.config.arguments import check_arguments, parameter_names
from common.config.registry import METRIC_REGISTRY
from common.distributed import Rank, from_main, gather_objects, gather_to_main, group_hidden
from common.evaluation.loss import Inputs, Term, look_up, own_settings

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


class MetricSections:
    """Checks a section that maps names to metrics: `{Accuracy: null, top3: {type: Accuracy, k: 3}}`."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if not isinstance(value, Mapping):
            yield Problem(key, value, "must map names to metrics; {} for none")
            return
        for name, section in value.items():
            below = f"{key}.{name}"
            section = section or {}
            yield from METRIC_REGISTRY.check(section, below, ignore=_OWN, default_type=name)
            settings = own_settings(section, _OWN)
            yield from check_arguments(Term, settings, below, lambda: "every metric", provided=("name", "function"))


class MetricFactory:
    """The configured metrics, empty.

    With `inputs: {label: batch.labels}` a metric finds `label` in the output and in the batch: the value at that path.
    An object of another package that has `update` and `compute` (torchmetrics) gets its `inputs` as arguments.
    """

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._empty: dict[str, Any] = {}
        self._inputs: dict[str, Inputs] = {}
        for name, section in sections.items():
            settings = section or {}
            if settings.get("inputs"):
                self._inputs[name] = settings["inputs"]
            metric = METRIC_REGISTRY.build({"type": name, **settings}, ignore=_OWN)
            if not isinstance(metric, (Metric, GatheredMetric)):
                _check_foreign(name, metric, self._inputs)
            self._empty[name] = metric

    def start(self, rank: Rank) -> "MetricDict":
        """Empty metrics for this process' part of one pass over a dataset."""
        return MetricDict(copy.deepcopy(self._empty), self._inputs, rank)


def _check_foreign(
    name: str,
    metric: Any,
    inputs: Mapping[str, Inputs],
) -> None:
    kind = type(metric).__name__
    if not (hasattr(metric, "update") and hasattr(metric, "compute")):
        rule = "derives from neither Metric nor GatheredMetric, and lacks update or compute"
        raise UserError(f"metric.{name}: {kind} {rule}")
    if name not in inputs:
        takes = ", ".join(parameter_names(metric.update))
        hint = "say where they are, as in inputs: {preds: output.logits, target: batch.label}"
        raise UserError(f"metric.{name}: {kind} takes {takes}; {hint}")


class MetricDict:
    """The metrics of one pass. While their methods run, no process group is to be seen: only this class merges."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        inputs: Mapping[str, Inputs],
        rank: Rank,
    ) -> None:
        self._metrics = metrics
        self._inputs = inputs
        self._rank = rank
        self._buffers = {name: SampleBuffer(name) for name in metrics}

    def update(
        self,
        output: Any,
        batch: Any,
        indices: Sequence[int],
    ) -> None:
        """Add a batch of the samples `indices` of the dataset."""
        for name, metric in self._metrics.items():
            with group_hidden(), error_context(lambda name=name: f"in metric.{name}"):  # type: ignore[misc]
                self._update(name, metric, output, batch, indices)

    def _update(
        self,
        name: str,
        metric: Any,
        output: Any,
        batch: Any,
        indices: Sequence[int],
    ) -> None:
        given = [output, batch]
        found: dict[str, Any] = {}
        if name in self._inputs:
            found = look_up(self._inputs[name], output, batch, f"metric.{name}")
            # Parts that `inputs` does not name stay as they are, so one name that differs is one line.
            for at, part in enumerate(given):
                given[at] = found
                if isinstance(part, Mapping):
                    given[at] = {**part, **found}
        if isinstance(metric, Metric):
            metric.update(*given)
        elif isinstance(metric, GatheredMetric):
            self._buffers[name].add(metric.results(*given), indices)
        elif self._rank.is_single_process:
            metric.update(**_on_cpu(found))
        else:
            self._buffers[name].keep(found, indices)

    def compute(self) -> dict[str, float]:
        """Values over all processes, the same on each of them: `name`, or `name.part` for a metric with several.

        Every process must call this.
        """
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with error_context(lambda name=name: f"in metric.{name}"):  # type: ignore[misc]
                values |= _numbers(name, self._compute(name, metric))
        return values

    def _compute(self, name: str, metric: Any) -> Any:
        """Return the value of a metric, the same on every process."""
        rank = self._rank
        if isinstance(metric, Metric):
            merged, *others = gather_objects(metric, rank)
            with group_hidden():
                for other in others:  # in rank order on every process, so the sums are the same
                    merged.merge(other)
                return merged.compute()
        batches = self._buffers.pop(name).gather(rank)  # held no longer than needed
        value = None
        if rank.is_main:
            with group_hidden():
                if isinstance(metric, GatheredMetric):
                    value = metric.compute(joined(batches))
                else:  # one object sees all batches in their order: its value is the value of one process
                    for batch in batches:
                        metric.update(**batch)
                    value = metric.compute()
        return from_main(value, rank)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield each number of a value: of a dict by its keys, of a tensor or a list with several by their places."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from _numbers(f"{name}.{part}", item)
    else:
        yield name, float(value)


def _on_cpu(values: Any) -> Any:
    """Copy tensors to the CPU, also from there: a worker's keeps a file open, and a view its whole base alive."""
    return map_tensors(values, lambda tensor: tensor.detach().to("cpu", copy=True))


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
        self.keep(results, indices)

    def keep(self, results: Results, indices: Sequence[int]) -> None:
        """Keep what belongs to a batch of the samples `indices`, whatever its lengths."""
        self._batches.append((indices[0], _on_cpu(results)))

    def gather(self, rank: Rank) -> list[Results]:
        """Gather the batches of all processes on the main one, in the order of the dataset; nothing on the others."""
        gathered = chain.from_iterable(gather_to_main(self._batches, rank))
        return [results for _, results in sorted(gathered, key=lambda batch: batch[0])]


def joined(batches: list[Results]) -> Results:
    """Return the results of all samples by name."""
    together: Results = {}
    if not batches:
        return together
    for name, first in batches[0].items():
        parts = [results[name] for results in batches]
        if isinstance(first, Tensor):
            together[name] = torch.cat(parts)
        else:
            together[name] = list(chain.from_iterable(parts))
    return together


def class_numbers(label: Tensor, logits: Tensor) -> Tensor:
    """Return the class of each label, int64; -1 for one that is no class, such as -100, -1 or 255: it is ignored.

    Args:
        label: class numbers (B, ...), or probabilities (B, classes, ...), of which the likeliest class counts.
        logits: (B, classes, ...).
    """
    if label.is_floating_point() and label.shape == logits.shape:
        return label.argmax(dim=1)
    is_class = (label >= 0) & (label < logits.shape[1])
    return label.long().masked_fill(~is_class, -1)
