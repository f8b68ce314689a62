"""The weighted sum of losses that the config names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.base.errors import UserError
from common.config import Problem
from common.config.registry import LOSS_REGISTRY
from common.distributed import DistConfig, Rank, gather_objects
from common.evaluation.exact import ExactSum

# Keys of a loss section that are ours; the others are arguments of the loss.
_OWN = ("weight", "inputs")
# Values after which those of a long pass are read, so that they do not pile up in the device's memory.
_MOST_WAITING = 1000

Losses = dict[str, Any]
"""`sum`: the scalar to minimise; `names`: the parts; each part under its name, before its weight. Sample means."""


class LossSections:
    """Checks a section that maps names to losses: `{CrossEntropyLoss: {weight: 1.0, label_smoothing: 0.1}}`."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if not isinstance(value, Mapping) or not value:
            yield Problem(key, value, "must name at least one loss")
            return
        for name, section in value.items():
            if name in ("loss", "sum", "names"):
                yield Problem(
                    f"{key}.{name}", section, "is a name of the weighted sum; choose another one, with a type"
                )
            section = {} if section is None else section
            inputs = section.get("inputs") if isinstance(section, Mapping) else None
            mapped = tuple(inputs) if isinstance(inputs, Mapping) else ()
            yield from LOSS_REGISTRY.check(section, f"{key}.{name}", ignore=_OWN, default_type=name, mapped=mapped)
            if isinstance(section, Mapping):
                yield from _check_own(section, f"{key}.{name}")


def _check_own(section: Mapping[str, Any], key: str) -> Iterator[Problem]:
    weight = section.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        yield Problem(f"{key}.weight", weight, "must be a number")
    inputs = section.get("inputs")
    if inputs is None:
        return
    if not isinstance(inputs, Mapping):
        yield Problem(f"{key}.inputs", inputs, "must map argument names to output.<name> or batch.<name>")
        return
    for argument, path in inputs.items():
        if not isinstance(path, str) or path.split(".")[0] not in ("output", "batch"):
            rule = "must be output.<name> or batch.<name>, what the model gave or what the data set gave"
            yield Problem(f"{key}.inputs.{argument}", path, rule)


def measured_losses(sections: Mapping[str, Any]) -> list[str]:
    """The sum and the losses that are part of it; those with the weight 0 are not computed."""
    return [
        "loss",
        *(name for name, each in sections.items() if not isinstance(each, Mapping) or each.get("weight") != 0),
    ]


@dataclass(frozen=True)
class _Term:
    name: str
    weight: float
    function: Callable[..., Any]
    inputs: dict[str, list[str]] | None

    def mapped(self, output: Any, batch: Any) -> Any:
        source, inputs = {"output": output, "batch": batch}, self.inputs or {}
        return self.function(**{key: _look_up(source, path, self.name) for key, path in inputs.items()})


class LossFactory:
    """Calls every configured loss and sums what they give.

    A loss is any callable. Without `inputs` it is called as `loss(output, batch)`; with
    `inputs: {input: output.logits, target: batch.label}` its arguments are looked up, so that the losses of `torch.nn`
    serve as they are. It returns a scalar tensor, the mean over the samples, or a dict of such parts.
    """

    def __init__(self, sections: Mapping[str, Any]) -> None:
        terms = []
        for name, section in sections.items():
            section = section or {}
            function = LOSS_REGISTRY.build({"type": name, **section}, ignore=_OWN)
            inputs = section.get("inputs")
            paths = None if inputs is None else {key: path.split(".") for key, path in inputs.items()}
            terms.append(_Term(name, float(section.get("weight", 1.0)), function, paths))
        self.terms = [term for term in terms if term.weight != 0]
        if not self.terms:
            raise UserError("loss: every weight is 0, so there is nothing to minimise; give one loss a weight")

    def attach(self, model: nn.Module, dist: DistConfig | None = None) -> None:
        """Make losses that have weights or buffers a part of `model`, called `loss`.

        So they are moved, trained, exchanged, averaged and saved like the rest of it. Call it before anything is done
        with the model. Raises `UserError` where that cannot be; `dist`: of the training.
        """
        own: dict[str, nn.Module] = {}
        for term in self.terms:
            name, function = term.name, term.function
            if not _has_state(function):
                continue
            if not isinstance(function, nn.Module):
                kind = type(function).__name__
                raise UserError(f"loss.{name}: its weights would not be trained; derive {kind} from nn.Module")
            weights = any(True for _ in function.parameters())
            if weights and dist is not None and (dist.strategy == "fsdp" or dist.find_unused_parameters):
                raise UserError(
                    f"loss.{name} has weights, and is called outside of the model's forward, which neither "
                    "dist.strategy fsdp nor dist.find_unused_parameters can do; use ddp, and dist.static_graph"
                )
            own[name.replace(".", "_")] = function
        if own and (isinstance(model, nn.Sequential) or hasattr(model, "loss")):
            raise UserError(
                f"loss.{next(iter(own))} has weights or buffers, which become the part `loss` of the model; but "
                f"{type(model).__name__} has a `loss`, or is an nn.Sequential, which would call it as a layer. Wrap it "
                "in an nn.Module without, which calls it in its forward"
            )
        if own:
            model.loss = nn.ModuleDict(own)

    def __call__(self, output: Any, batch: Any) -> Losses:
        losses: Losses = {"names": []}
        total: Tensor | None = None
        for term in self.terms:
            value = term.function(output, batch) if term.inputs is None else term.mapped(output, batch)
            parts = value.items() if isinstance(value, dict) else ((None, value),)
            for part, number in parts:
                weighted = number if term.weight == 1.0 else number * term.weight
                total = weighted if total is None else total + weighted
                name = term.name if part is None else f"{term.name}.{part}"
                losses[name] = number
                losses["names"].append(name)
        losses["sum"] = total
        return losses


def _has_state(function: Any) -> bool:
    """Whether a loss is a module with weights or buffers, or has a weight or a module with weights as an attribute."""
    if isinstance(function, nn.Module):
        return any(True for _ in (*function.parameters(), *function.buffers()))
    return any(
        isinstance(each, nn.Parameter) or (isinstance(each, nn.Module) and any(True for _ in each.parameters()))
        for each in getattr(function, "__dict__", {}).values()
    )


class LossSums:
    """The mean losses of one pass over a data set, from the means of its batches.

    Batches leave their losses on the device, read together at the end. Sums are exact, so the means do not depend on
    which process had which batch.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, int, Tensor]] = []
        self._sums: dict[str, ExactSum] = {}
        self._samples = 0

    def add(self, losses: Losses, samples: int) -> None:
        """Keep the losses of a batch."""
        self._waiting += [(name, samples, losses[name].detach()) for name in ("sum", *losses["names"])]
        self._samples += samples
        if len(self._waiting) > _MOST_WAITING:
            self._read()

    def _read(self) -> None:
        if not self._waiting:  # this process had no sample
            return
        means = torch.stack([mean.double() for _, _, mean in self._waiting]).tolist()
        for (name, samples, _), mean in zip(self._waiting, means, strict=True):
            self._sums.setdefault(name, ExactSum()).add(mean * samples)
        self._waiting = []

    def means(self, rank: Rank) -> tuple[dict[str, float], int]:
        """`loss` (the weighted sum) and each part, over the samples of all processes; and how many these are."""
        self._read()
        (sums, total), *others = gather_objects((self._sums, self._samples), rank)
        for more, samples in others:
            total += samples
            for name, part in more.items():
                sums.setdefault(name, ExactSum()).merge(part)
        means = {name: part.value / total for name, part in sums.items()}
        return {"loss": means.pop("sum"), **means}, total


def _look_up(source: Any, path: list[str], loss: str) -> Any:
    value = source
    for name in path:
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif not isinstance(value, Mapping) and hasattr(value, name):
            value = getattr(value, name)
        elif isinstance(value, (list, tuple)) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            if is_dataclass(value):
                known = ", ".join(vars(value))
            raise UserError(f"loss.{loss}.inputs: {'.'.join(path)} does not exist; there is: {known}")
    return value
