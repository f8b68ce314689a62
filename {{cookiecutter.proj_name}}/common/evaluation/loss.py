"""The weighted sum of losses that the config names."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from pydantic import AfterValidator
from torch import Tensor, nn

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.config import Problem
from common.config.arguments import check_arguments
from common.config.registry import LOSS_REGISTRY, Registry
from common.distributed import Rank, gather_objects
from common.monitor.meter import to_floats

# Keys of a loss section that are read here; all others are arguments of the loss.
_OWN = ("weight", "inputs")


def _input_path(path: str) -> str:
    if path.split(".")[0] not in ("output", "batch"):
        raise ValueError("must be output.<name> or batch.<name>: the model's output or the dataset's batch")
    return path


Inputs = dict[str, Annotated[str, AfterValidator(_input_path)]]
"""Names, and where each value is: `{input: output.logits, target: batch.label}`."""
Losses = dict[str, Tensor]
"""Scalars, means over samples: `loss`, which is minimised, then its parts by name, unweighted; all are logged."""


class LossSections:
    """Checks a section that maps names to losses: `{CrossEntropyLoss: {weight: 1.0, label_smoothing: 0.1}}`."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if value is None:  # the task computes its own
            return
        if not isinstance(value, Mapping) or not value:
            yield Problem(key, value, "must name at least one loss", "or be null, if the task computes its own")
            return
        for name, part in value.items():
            below = f"{key}.{name}"
            if name == "loss":
                yield Problem(below, part, "is the name of the weighted sum; choose another one, with a type")
            yield from check_entry(LOSS_REGISTRY, name, part or {}, below, _OWN)


def check_entry(
    registry: Registry,
    name: str,
    section: Any,
    key: str,
    own: Sequence[str],
) -> Iterator[Problem]:
    """Yield the problems of the section of a loss or metric. `own`: its keys that are not arguments of the object."""
    settings: dict[str, Any] = {}
    if isinstance(section, Mapping):
        settings = {part: section[part] for part in own if part in section}
    inputs = settings.get("inputs")
    mapped: Collection[str] = ()
    if isinstance(inputs, Mapping):
        mapped = inputs
    yield from registry.check(section, key, ignore=own, default_type=name, mapped=mapped)
    yield from check_arguments(Term, settings, key, f"every {registry.kind}", provided=("name", "function"))


@dataclass(frozen=True)
class Term:
    """One loss; metrics have the same `inputs`."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    inputs: Inputs | None = None


def look_up(
    inputs: Inputs,
    output: Any,
    batch: Any,
    key: str,
) -> dict[str, Any]:
    """Return the values of `inputs` by name.

    `key`: of the config, for the message of the `UserError` if there is none.
    """
    found: dict[str, Any] = {}
    for name, path in inputs.items():
        value: Any = {"output": output, "batch": batch}
        try:
            for part in path.split("."):
                if isinstance(value, Mapping):
                    value = value[part]
                elif part.removeprefix("-").isdecimal():
                    value = value[int(part)]
                else:
                    value = getattr(value, part)
        except (LookupError, TypeError, AttributeError) as error:
            known = f"a {type(value).__name__}"
            if isinstance(value, Mapping):
                known = ", ".join(map(str, value))
            raise UserError(f"{key}.inputs: {path} does not exist; available: {known}") from error
        found[name] = value
    return found


class LossFactory(nn.Module):
    """Computes every configured loss and their weighted sum. Losses that are modules are its parts, by name.

    A loss is any callable. Without `inputs` it is called as `loss(output, batch)`; with
    `inputs: {input: output.logits, target: batch.label}` its arguments are looked up, so the losses of `torch.nn` work
    unchanged. It returns a scalar tensor, the mean over the samples, or a dict of such parts.
    """

    def __init__(self, sections: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.terms: list[Term] = []
        self._weights: dict[str, float] = {}
        sections = sections or {}
        for name in measured_losses(sections):
            part = sections[name] or {}
            function = LOSS_REGISTRY.build({"type": name, **part}, ignore=_OWN)
            self.terms.append(Term(name, function, inputs=part.get("inputs")))
            if isinstance(function, nn.Module):
                self.add_module(name.replace(".", "_"), function)
        self.set_weights(sections)

    def set_weights(self, sections: Mapping[str, Any] | None) -> None:
        """Take the weights from sections of these losses."""
        for name, part in (sections or {}).items():
            self._weights[name] = (part or {}).get("weight", 1.0)

    def forward(self, output: Any, batch: Any) -> Losses:
        """`loss` and its parts; nothing if no loss is configured."""
        losses: Losses = {}
        weighted = []
        for term in self.terms:
            weight = self._weights[term.name]
            if term.inputs is None:
                value = term.function(output, batch)
            else:
                value = term.function(**look_up(term.inputs, output, batch, f"loss.{term.name}"))
            parts = {term.name: value}
            if isinstance(value, dict):
                parts = {f"{term.name}.{part}": item for part, item in value.items()}
            losses |= parts
            for value in parts.values():
                if weight != 1.0:
                    value = value * weight
                weighted.append(value)
        if not weighted:
            return {}
        return {"loss": sum(weighted[1:], weighted[0]), **losses}


def measured_losses(sections: Mapping[str, Any] | None) -> list[str]:
    """Return the losses that are part of the sum; losses with the weight 0 are not computed."""
    names = []
    for name, part in (sections or {}).items():
        if not isinstance(part, Mapping) or part.get("weight") != 0:
            names.append(name)
    return names


class LossSums:
    """The mean losses of one pass over a dataset, from the means of its batches.

    Losses stay on the device, and are read together at the end. Sums are rounded once, so the means do not depend on
    which process had which batch.
    """

    def __init__(self) -> None:
        self._counts: list[tuple[int, int]] = []  # samples and items of each batch
        self._losses: list[Losses] = []

    def add(self, losses: Losses, samples: int, count: int) -> None:
        """Keep the losses of a batch of `samples`, which are means over `count` items."""
        self._counts.append((samples, count))
        self._losses.append(map_tensors(losses, Tensor.detach))  # not the graph of every batch

    def means(self, rank: Rank) -> tuple[dict[str, float], int]:
        """`loss` (the weighted sum) and each part, over the items of all processes; and the number of samples."""
        batches = list(zip(self._counts, to_floats(self._losses), strict=True))
        all_samples = 0
        totals: defaultdict[str, int] = defaultdict(int)  # of items: a loss may be of some batches only
        terms: defaultdict[str, list[float]] = defaultdict(list)
        for (samples, count), losses in chain.from_iterable(gather_objects(batches, rank)):
            all_samples += samples
            for name, mean in losses.items():
                totals[name] += count
                values = terms[name]
                if count:  # the mean over nothing is NaN
                    values.append(mean * count)
        means = {}
        for name, values in terms.items():
            # Rounded once, so the order of the terms has no effect; `fsum` raises an error for infinities of two signs.
            added = sum(values)
            if all(map(math.isfinite, values)):
                added = math.fsum(values)
            means[name] = math.nan
            if totals[name]:
                means[name] = added / totals[name]
        return means, all_samples
