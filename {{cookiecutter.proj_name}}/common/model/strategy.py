"""How processes train one model together: a single process, or replicas that average their gradients (DDP)."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import DistConfig, Rank
from common.optim.precision import Precision

_NOTHING = nullcontext()


class Strategy(ABC):
    """A prepared model, and how it is trained on all processes.

    Attributes:
        about: how it was prepared, in a few words for the log and the checkpoint.
        module: the model itself, whose names carry no prefix of a wrapper.
        model: what training calls.
        precision: of the forward pass.
        lockstep_forward: whether each forward pass needs all processes, so that all must make the same number of them.
    """

    lockstep_forward = False

    def __init__(self, about: str, module: nn.Module, model: nn.Module, precision: Precision) -> None:
        self.about = about
        self.module = module
        self.model = model
        self.precision = precision

    @abstractmethod
    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        """Whether the backward passes within this context average gradients over all processes."""

    def shard_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a checkpoint, with its tensors as this strategy holds them."""
        return state


class Alone(Strategy):
    """One process."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__("whole", model, model, precision)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        return _NOTHING


class Replicated(Strategy):
    """Every process holds the whole model; gradients are averaged during the backward pass (DDP)."""

    def __init__(self, model: nn.Module, precision: Precision, config: DistConfig, rank: Rank) -> None:
        wrapped = DistributedDataParallel(
            model,
            device_ids=[rank.device.index] if rank.device.type == "cuda" else None,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **_buffers(config.broadcast_buffers),
        )
        super().__init__("whole", model, wrapped, precision)
        self._wrapped = wrapped

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        return _NOTHING if enabled else self._wrapped.no_sync()


def _buffers(broadcast: bool) -> dict[str, Any]:
    """The option that keeps DDP from broadcasting buffers; it has another name since PyTorch 2.13."""
    if broadcast:
        return {}
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": False}
