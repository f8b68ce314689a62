"""A moving average of the weights, often better than the weights themselves, swapped in for evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from common.base.errors import UserError
from common.config import section
from common.distributed.sharded import local


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


class Ema:
    """The average turned off, and the base of the real one. Models are given without wrappers (DDP)."""

    def update(self, model: nn.Module) -> None:
        """Take in the weights. Call it after every optimizer step that was not skipped."""

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within this context the model has the averaged weights; after it, its own again, whatever happened."""
        yield

    def reset(self, model: nn.Module) -> None:
        """Begin again from the model's present weights. Needed when weights were loaded after the average was built."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs. The tensors are the average itself, not copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


class WeightAverage(Ema):
    """The tensors of `model.state_dict()`: floating point ones are averaged, in at least 32 bits, others copied.

    Of sharded weights (FSDP), each process averages its part.
    """

    def __init__(self, config: EmaConfig, model: nn.Module) -> None:
        self._config = config
        self._steps = 0
        self._updates = 0
        self._swapped = False
        state = _tensors(model)
        places: dict[int, str] = {}
        # Tied weights are one tensor with several names: it is averaged once, under the first of them.
        self._first_name = {name: places.setdefault(id(tensor), name) for name, tensor in state.items()}
        self._shadow = {name: _wide(state[name].detach().clone()) for name in places.values()}
        self._parts = [local(tensor) for tensor in self._shadow.values()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self._refuse_while_swapped("update")
        self._steps += 1
        if self._steps % self._config.every:
            return
        pairs = list(zip(self._parts, self._live(model), strict=True))
        averaged = [(mean, tensor.to(mean.dtype)) for mean, tensor in pairs if _is_averaged(mean)]
        copied = [pair for pair in pairs if not _is_averaged(pair[0])]
        if averaged:
            torch._foreach_lerp_([mean for mean, _ in averaged], [tensor for _, tensor in averaged], 1.0 - self.decay)
        _copy([mine for mine, _ in copied], [tensor for _, tensor in copied])
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
                "or start a new run from the weights with progress.start_epoch 0"
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

    def _live(self, model: nn.Module) -> list[Tensor]:
        """The model's tensors in the order of `_parts`. Looked up each time, since a module may replace a buffer."""
        state = _tensors(model)
        return [local(state[name].detach()) for name in self._shadow]

    def _refuse_while_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(f"{what} of the weight average inside its own `applied`: leave the context first")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)  # the tensors themselves: tied ones are the same object
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """Half precision is too coarse to add a thousandth to; anything wider stays as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def build_ema(config: EmaConfig, model: nn.Module) -> Ema:
    """The configured average, starting from the present weights of `model`."""
    return WeightAverage(config, model) if config.decay > 0.0 else Ema()


def averaged_state_dict(model_state: Mapping[str, Any], ema_state: Mapping[str, Any]) -> dict[str, Any]:
    """`model_state` with the averages of `ema_state` in the model's own types; unchanged where there is none."""
    shadow = ema_state.get("shadow", {})
    return {
        name: shadow[name].to(value.dtype) if isinstance(value, Tensor) and name in shadow else value
        for name, value in model_state.items()
    }
