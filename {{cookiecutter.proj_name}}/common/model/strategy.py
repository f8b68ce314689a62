"""How processes train one model together: a single process, or replicas that average their gradients (DDP)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import DistConfig, Rank
from common.optim.precision import Precision

_NOTHING = nullcontext()


class Strategy:
    """A prepared model, and how processes train it. This class: a single process.

    Attributes:
        about: how it was prepared, in a few words for the log and the checkpoint.
        module: the model without wrappers, so names have no prefix.
        model: what training calls: the module or its wrapper.
        precision: number format of the forward pass.
        lockstep_forward: whether each forward pass needs all processes, so that all must make the same number of them.
    """

    lockstep_forward = False

    def __init__(self, module: nn.Module, precision: Precision, about: str = "whole") -> None:
        self.about = about
        self.module = self.model = module
        self.precision = precision

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        """A context in which backward passes average gradients over all processes only if `enabled`."""
        return _NOTHING

    def shard_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a checkpoint, with its tensors as this strategy holds them."""
        return state


class Replicated(Strategy):
    """Every process holds the whole model; gradients are averaged during the backward pass (DDP)."""

    def __init__(self, model: nn.Module, precision: Precision, config: DistConfig, rank: Rank) -> None:
        super().__init__(model, precision)
        self.model = self._wrapped = DistributedDataParallel(
            model,
            device_ids=[rank.device.index] if rank.device.type == "cuda" else None,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
        )
        self._wrapped.broadcast_buffers = config.broadcast_buffers  # the argument's name depends on PyTorch's version

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        return _NOTHING if enabled else self._wrapped.no_sync()
