"""A moving average of the weights, often better than the weights themselves, swapped in for evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from common.base.errors import UserError
from common.config import section
from common.distributed.sharded import is_sharded, local


@section
class EmaConfig:
    """Moving average of the weights."""

    decay: Annotated[
        float, Field(ge=0.0, lt=1.0, description="weight of the old average in the new one; 0 turns it off")
    ] = 0.0
    warmup: Annotated[
        bool, Field(description="begin with (1 + n) / (10 + n) at update n, to forget the first weights sooner")
    ] = True
    every: Annotated[int, Field(ge=1, description="optimizer steps between updates")] = 1


class Ema(ABC):
    """What a trainer does with an average. Models are given bare, not wrapped for several ranks."""

    @abstractmethod
    def update(self, model: nn.Module) -> None:
        """Take in the weights. Call it after every optimizer step that was not skipped."""

    @abstractmethod
    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within this context the model has the averaged weights; after it, its own again, whatever happened."""

    @abstractmethod
    def reset(self, model: nn.Module) -> None:
        """Begin again from the model's present weights. Needed when weights were loaded after the average was built."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that a continued run needs. The tensors are the average itself, not copies."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


def build_ema(config: EmaConfig, model: nn.Module) -> Ema:
    """The configured average, starting from the present weights of `model`."""
    return WeightAverage(config, model) if config.decay > 0.0 else NoEma()


def averaged_state_dict(model_state: Mapping[str, Any], ema_state: Mapping[str, Any]) -> dict[str, Any]:
    """`model_state` with the averages of `ema_state` in the model's own types; unchanged for the state of `NoEma`."""
    shadow = ema_state.get("shadow", {})
    return {
        name: shadow[name].to(value.dtype) if isinstance(value, Tensor) and name in shadow else value
        for name, value in model_state.items()
    }


class NoEma(Ema):
    """The average turned off: evaluation sees the weights themselves."""

    _context: AbstractContextManager[None] = nullcontext()

    def update(self, model: nn.Module) -> None:
        """Nothing to do."""

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._context

    def reset(self, model: nn.Module) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do; the average of an earlier run is left behind."""


class WeightAverage(Ema):
    """Floating point parameters and buffers are averaged, in 32 bits at least; what counts is copied.

    Covers what `model.state_dict()` covers, so buffers that are not saved stay out. Of sharded weights (FSDP), each
    process averages its part.
    """

    def __init__(self, config: EmaConfig, model: nn.Module) -> None:
        self._config = config
        self._steps = 0
        self._updates = 0
        self._swapped = False
        self._bind(model)
        clones = [_wide(table[key].detach().clone()) for table, key in self._slots]
        self._shadow = dict(zip(self._names, clones, strict=True))
        self._parts = [local(tensor) for tensor in clones]
        self._sort()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self._refuse_while_swapped("update")
        self._steps += 1
        if self._steps % self._config.every:
            return
        live = self._live(model)
        weight = 1.0 - self.decay
        averaged = [live[i] for i in self._averaged]
        if self._narrow:
            averaged = [tensor.to(mean.dtype) for tensor, mean in zip(averaged, self._means, strict=True)]
        torch._foreach_lerp_(self._means, averaged, weight)
        if self._copied:
            torch._foreach_copy_(self._copies, [live[i] for i in self._copied])
        self._updates += 1

    @property
    def decay(self) -> float:
        """Weight of the old average at the next update."""
        if not self._config.warmup:
            return self._config.decay
        return min(self._config.decay, (1 + self._updates) / (10 + self._updates))

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        self._refuse_while_swapped("applied")
        live = self._live(model)
        own = [tensor.detach().clone() for tensor in live]
        self._swapped = True
        try:
            # Into the model's own memory: what points there (compiled graphs, wrappers, the optimizer) stays valid.
            _copy(live, self._parts)
            yield
        finally:
            _copy(live, own)
            self._swapped = False

    @torch.no_grad()
    def reset(self, model: nn.Module) -> None:
        self._refuse_while_swapped("reset")
        self._steps = self._updates = 0
        _copy(self._parts, self._live(model))

    def state_dict(self) -> dict[str, Any]:
        """The averages under the names of the model's own state, and how many steps and updates they have seen."""
        self._refuse_while_swapped("state_dict")
        shadow = {name: self._shadow[first] for name, first in self._first_name.items()}
        return {"shadow": shadow, "steps": self._steps, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `UserError` when the state is of another model, or of a run without an average."""
        self._refuse_while_swapped("load_state_dict")
        saved = state.get("shadow")
        if saved is None:
            raise UserError(
                f"optim.ema.decay {self._config.decay}: the checkpoint holds no average of the weights; set it to 0, "
                "or start anew from the weights with progress.start_epoch 0"
            )
        for name, first in self._first_name.items():
            if name not in saved or saved[name].shape != self._shadow[first].shape:
                found = f"shape {tuple(saved[name].shape)}" if name in saved else "nothing"
                raise UserError(
                    f"optim.ema: the checkpoint's average has {found} for {name}, the model has shape "
                    f"{tuple(self._shadow[first].shape)}; resume with the model that was trained"
                )
        _copy(self._parts, [local(saved[name]) for name in self._shadow])
        self._steps, self._updates = state["steps"], state["updates"]

    def _bind(self, model: nn.Module) -> None:
        """Find where the model keeps each saved tensor. The places outlive the tensors, which `to` may replace."""
        self._model = model
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._first_name: dict[str, str] = {}  # every name in the model's state -> the first of its tensor's names
        places: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is None or key in module._non_persistent_buffers_set:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    if id(tensor) not in places:
                        places[id(tensor)] = name
                        self._slots.append((table, key))
                    self._first_name[name] = places[id(tensor)]
        self._names = list(places.values())
        self._sharded = any(is_sharded(table[key]) for table, key in self._slots)

    def _sort(self) -> None:
        """Split the shadow, once, into what is averaged and what is copied."""
        shadow = self._parts
        self._averaged = [i for i, tensor in enumerate(shadow) if tensor.is_floating_point() or tensor.is_complex()]
        self._copied = [i for i in range(len(shadow)) if i not in set(self._averaged)]
        self._means = [shadow[i] for i in self._averaged]
        self._copies = [shadow[i] for i in self._copied]
        live = self._live()
        self._narrow = any(live[i].dtype != shadow[i].dtype for i in self._averaged)

    def _live(self, model: nn.Module | None = None) -> list[Tensor]:
        if model is not None and model is not self._model:
            raise RuntimeError("this average belongs to another model: give the bare one that it was built with")
        live = [table[key] for table, key in self._slots]
        return [local(tensor.detach()) for tensor in live] if self._sharded else live

    def _refuse_while_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(f"{what} of the weight average inside its own `applied`: leave the context first")


def _wide(tensor: Tensor) -> Tensor:
    """Half precision is too coarse to add a thousandth to; anything wider stays as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
