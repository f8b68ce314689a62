"""How processes train one model together: a single process, or replicas that average their gradients (DDP)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import DistConfig, buffer_kinds
from common.model.freeze import freeze
from common.optim.precision import Precision

_NOTHING = nullcontext()


class Strategy:
    """A prepared task, and how processes train it. This class: a single process.

    Attributes:
        about: how it was prepared, in a few words for the log and the checkpoint.
        task: without wrappers, so names have no prefix.
        precision: number format of the forward pass.
        frozen: the patterns of frozen parameters, and a function that unfreezes these.
        lockstep_forward: whether each forward pass needs all processes, so that all must make the same number of them.
    """

    lockstep_forward = False

    def __init__(self, task: nn.Module, precision: Precision, about: str = "whole") -> None:
        self.about = about
        self.task = task
        self.precision = precision
        self.frozen: tuple[Sequence[str], Callable[[], None]] = [], lambda: None

    def freeze(self, patterns: Sequence[str]) -> None:
        """Freeze the parameters that any of `patterns` matches, and no longer those that were frozen so far."""
        before, unfreeze = self.frozen
        if patterns != before:
            unfreeze()
            self.frozen = patterns, freeze(self.task, patterns)

    def wrap(self, trained: Sequence[nn.Parameter]) -> nn.Module:
        """Return the module to call in an update of these parameters. Every process must call this."""
        return self.task

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """A context in which backward passes of a wrapped task average gradients over processes only if `enabled`."""
        return _NOTHING

    def shard_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a checkpoint, with its tensors as this strategy holds them."""
        return state


class Replicated(Strategy):
    """Every process holds the whole task; gradients are averaged during the backward pass (DDP)."""

    def __init__(self, task: nn.Module, precision: Precision, config: DistConfig) -> None:
        super().__init__(task, precision)
        self._config = config

    def wrap(self, trained: Sequence[nn.Parameter]) -> nn.Module:
        config, chosen = self._config, set(trained)
        others = [name for name, parameter in self.task.named_parameters() if parameter not in chosen]
        # DDP writes the name of a parameter of the task itself with a dot in front.
        ignored = [*others, *(f".{name}" for name in others if "." not in name), *buffer_kinds(self.task)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.task, ignored)
        wrapped = DistributedDataParallel(
            self.task,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
        )
        wrapped.broadcast_buffers = config.broadcast_buffers  # the argument's name depends on PyTorch's version
        return wrapped

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return model.no_sync() if not enabled and isinstance(model, DistributedDataParallel) else _NOTHING
