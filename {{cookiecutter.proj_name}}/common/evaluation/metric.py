"""Metrics: accumulated batch by batch, or computed from the results of all samples; over all ranks, once at the end."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from common.base.errors import UserError, error_context
from common.base.nested import map_tensors
from common.config import Problem
from common.config.arguments import parameter_names
from common.config.registry import METRIC_REGISTRY
from common.distributed import Rank, from_main, gather_objects, gather_to_main, group_hidden
from common.distributed.seed import seed_all
from common.evaluation.loss import Inputs, check_entry, look_up

_OWN = ("inputs",)  # keys of a metric's section that are read here; all others are its arguments

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
        higher_is_better: for `best.mode: auto`: whether higher values are better; None: unknown.
    """

    higher_is_better: ClassVar[bool | None] = None

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
        higher_is_better: for `best.mode: auto`: whether higher values are better; None: unknown.
    """

    higher_is_better: ClassVar[bool | None] = None

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
            yield from check_entry(METRIC_REGISTRY, name, section or {}, f"{key}.{name}", _OWN)


class MetricFactory:
    """The configured metrics, empty.

    With `inputs: {label: batch.labels}` a metric finds `label` in the output and in the batch: the value at that path.
    An object of another package that has `update` and `compute` (torchmetrics) gets its `inputs` as arguments.
    """

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self.empty: dict[str, Any] = {}
        self.inputs: dict[str, Inputs] = {}
        for name, section in sections.items():
            settings = section or {}
            if settings.get("inputs"):
                self.inputs[name] = settings["inputs"]
            metric = METRIC_REGISTRY.build({"type": name, **settings}, ignore=_OWN)
            self.empty[name] = metric
            if isinstance(metric, (Metric, GatheredMetric)):
                continue
            kind = type(metric).__name__
            if not (hasattr(metric, "update") and hasattr(metric, "compute")):
                rule = "derives from neither Metric nor GatheredMetric, and lacks update or compute"
                raise UserError(f"metric.{name}: {kind} {rule}")
            if name not in self.inputs:
                takes = ", ".join(parameter_names(metric.update))
                hint = "say where they are, as in inputs: {preds: output.logits, target: batch.label}"
                raise UserError(f"metric.{name}: {kind} takes {takes}; {hint}")


class MetricDict:
    """The metrics of one pass. While their methods run, no process group is visible: only this class merges."""

    def __init__(self, configured: MetricFactory, rank: Rank) -> None:
        self._metrics = copy.deepcopy(configured.empty)
        self._inputs = configured.inputs
        self._rank = rank
        # Results for the samples of this process: of each batch, its first sample, and the results by name.
        self._batches: dict[str, list[tuple[int, Results]]] = {}
        for name in self._metrics:
            self._batches[name] = []

    def update(
        self,
        output: Any,
        batch: Any,
        indices: Sequence[int],
    ) -> None:
        """Add a batch of the samples `indices` of the dataset. Raises `UserError` for a result of another length."""
        for name, metric in self._metrics.items():
            with group_hidden(), error_context(f"in metric.{name}"):
                given = [output, batch]
                results: Results = {}
                if name in self._inputs:
                    results = look_up(self._inputs[name], output, batch, f"metric.{name}")
                    # Parts that `inputs` does not name stay as they are, so one name that differs is one line.
                    for at, part in enumerate(given):
                        given[at] = results
                        if isinstance(part, Mapping):
                            given[at] = {**part, **results}
                if isinstance(metric, Metric):
                    metric.update(*given)
                    continue
                if isinstance(metric, GatheredMetric):
                    results = metric.results(*given)
                    for result, value in results.items():
                        if len(indices) > 1 and len(value) != len(indices):  # a single item may be a batch
                            fault = f"{result} has {len(value)} for {len(indices)} samples"
                            raise UserError(f"every result must have one entry per sample, but {fault}")
                # Copied, also from the CPU: a worker's tensor keeps a file open, and a view its whole base alive.
                results = map_tensors(results, _on_cpu)
                if isinstance(metric, GatheredMetric) or not self._rank.is_single_process:
                    self._batches[name].append((indices[0], results))
                else:
                    seed_all(indices[0])  # as in `_computed`
                    metric.update(**results)

    def compute(self) -> dict[str, float]:
        """Values over all processes, the same on each of them: `name`, or `name.part` for a metric with several.

        Every process must call this.
        """
        rank = self._rank
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with error_context(f"in metric.{name}"):
                value: Any = None
                seed_all(0)  # for bootstrap samples and the like
                if isinstance(metric, Metric):
                    merged, *others = gather_objects(metric, rank)
                    with group_hidden():
                        for other in others:  # in rank order on every process, so the sums are the same
                            merged.merge(other)
                        value = merged.compute()
                else:
                    batches = self._batches.pop(name)  # held no longer than needed
                    gathered = list(chain.from_iterable(gather_to_main(batches, rank)))
                    gathered.sort(key=itemgetter(0))  # in the order of the dataset
                    if rank.is_main:
                        with group_hidden():
                            value = _computed(metric, gathered)
                    value = from_main(value, rank)
                values |= _numbers(name, value)
        return values


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _computed(metric: Any, batches: list[tuple[int, Results]]) -> Any:
    """Return the value from the batches of all processes, each with its first sample."""
    if isinstance(metric, GatheredMetric):
        return metric.compute(joined([results for _, results in batches]))
    for first, results in batches:  # one object sees all of them: its value is the value of one process
        seed_all(first)
        metric.update(**results)
    seed_all(0)
    return metric.compute()


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield each number of a value: of a dict by its keys, of a tensor or a list with several by their places."""
    if hasattr(value, "tolist"):  # a tensor or an array
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

    Raises:
        UserError: the shapes do not fit.
    """
    if label.is_floating_point() and label.shape == logits.shape:
        return label.argmax(dim=1)
    if label.shape != logits[:, 0].shape:
        shapes = f"labels of shape {tuple(label.shape)} do not fit logits {tuple(logits.shape)}"
        raise UserError(f"{shapes}: class numbers have the shape {tuple(logits[:, 0].shape)}")
    is_class = (label >= 0) & (label < logits.shape[1])
    return label.long().masked_fill(~is_class, -1)
