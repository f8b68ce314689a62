"""An exponential moving average (EMA) of the weights, often better than the raw ones; swapped in for evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.distributed import own_buffers
from common.distributed.collectives import local
from common.optim.average import Average
from common.optim.optimizer import parts_of
from common.progress import Interval, Position, are_due
from parts.ema.config import EmaConfig, OptimConfig


class Ema(Average):
    """The floating point tensors of `model.state_dict()`, averaged in at least 32 bits.

    Frozen parameters are not averaged until they are trained, nor are buffers that are declared in `own_buffers`.
    Pass models without wrappers (DDP). Each process averages its own shard of the weights (FSDP). With `decay` 0
    there is no average, and the other methods do nothing. Until `start` the average is a copy of the weights.

    Attributes:
        is_active: whether there is an average.
    """

    def __init__(self, config: EmaConfig, model: nn.Module) -> None:
        self._config, self.is_active = config, bool(config.decay)
        self._steps = self._updates = 0
        self._start = Interval.parse(config.start, "epoch")
        self._shadow, self._parts = dict[str, Tensor](), list[Tensor]()
        self._switched: list[Any] = []
        self._never = own_buffers(model)
        self.follow(model)
        if self.is_active:
            logger.info("validation and evaluation take averaged weights (optim.ema.decay {})", config.decay)

    def follow(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Also average newly trained parameters from now on. Call it when a stage begins, which may unfreeze some.

        An optimizer with the modes `train` and `eval` (schedule-free) averages by itself: its `eval` gives the average.
        """
        self._model = model
        parts = [] if optimizer is None else parts_of(optimizer)
        self._switched = [part for part in parts if hasattr(part, "train") and hasattr(part, "eval")]
        for part in self._switched:
            if self.is_active:
                raise UserError(f"optim.ema.decay: {type(part).__name__} averages the weights itself; set it to 0")
            part.train()
        if self.is_active:
            parameters = model.named_parameters(remove_duplicate=False)
            left_out = self._never | {name for name, parameter in parameters if not parameter.requires_grad}
            self._add({name: value for name, value in model.state_dict().items() if name not in left_out})

    def _add(self, tensors: Mapping[str, Any]) -> None:
        for name, value in tensors.items():
            if name in self._shadow or not isinstance(value, Tensor) or name.endswith("_extra_state"):
                continue
            if value.is_floating_point() or value.is_complex():
                # Half precision is too coarse for the small updates of an average.
                dtype = torch.promote_types(value.dtype, torch.float32)
                self._shadow[name] = value.to(dtype, copy=True)
        self._parts = [local(tensor) for tensor in self._shadow.values()]

    def update(self, model: nn.Module, at: Position) -> None:
        """Update the average with the model's weights: after every optimizer step that was not skipped, if `is_active`.

        `at` is the position before that step. Before `start`, the weights become the average.
        """
        self._steps += 1
        if self._start and True not in are_due([self._start], Position(), at):
            _copy(self._parts, self._weights(model))
            return
        if self._steps % self._config.every:
            return
        decay = self._config.decay
        if self._config.warmup:
            decay = min(decay, (1 + self._updates) / (10 + self._updates))
        weights = [tensor.to(part) for part, tensor in zip(self._parts, self._weights(model), strict=True)]
        torch._foreach_lerp_(self._parts, weights, 1.0 - decay)
        self._updates += 1

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within this context the model has the averaged weights; afterwards its own again, even after an error."""
        switched = [group["params"] for part in self._switched for group in part.param_groups]
        weights = self._weights(model) + [local(parameter) for parameters in switched for parameter in parameters]
        kept = [tensor.clone() for tensor in weights]
        try:
            # In place: references to this memory (compiled graphs, wrappers, the optimizer) stay valid.
            _copy(weights, self._parts if self.is_active else kept)
            for part in self._switched:
                part.eval()
            yield
        finally:
            for part in self._switched:
                part.train()
            _copy(weights, kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages (not copies) and the numbers of steps and updates; empty if turned off."""
        counts = {"steps": self._steps, "updates": self._updates}
        if self._switched:
            with self.applied(self._model), torch.no_grad():
                named = self._model.named_parameters(remove_duplicate=False)
                return {"shadow": {name: value.clone() for name, value in named if value.requires_grad}, **counts}
        return {"shadow": self._shadow, **counts} if self._shadow else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same model. Raises `UserError` if it holds no average."""
        if not self._shadow:
            return
        if "shadow" not in state:
            raise UserError(
                f"optim.ema.decay {self._config.decay}: the checkpoint has no EMA weights; set it to 0, "
                "or start a new run from the weights: --init_from.path FILE --name NEW"
            )
        saved = state["shadow"]
        # Parts frozen since then keep their average.
        self._add({name: tensor.to(self._parts[0].device) for name, tensor in saved.items() if name not in self._never})
        _copy(self._parts, [local(saved.get(name, tensor)) for name, tensor in self._shadow.items()])
        self._steps, self._updates = state["steps"], state["updates"]

    def _weights(self, model: nn.Module) -> list[Tensor]:
        """Return the model's tensors in the order of `_parts`; looked up, since a module may replace a buffer."""
        state = model.state_dict()
        return [local(state[name]) for name in self._shadow]


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def build(config: OptimConfig, model: nn.Module) -> Ema:
    """Fill the seat `average` of a run with this section `optim`."""
    return Ema(config.ema, model)
