"""How processes train one task together: a single process, or replicas that average their gradients (DDP)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.base.errors import UserError
from common.config.problem import join_names
from common.distributed import DistConfig, Rank, gather_objects, own_buffers
from common.distributed.buffers import buffers_unchanged
from common.distributed.seed import random_state_unchanged
from common.model.freeze import without_gradient
from common.optim.precision import Precision

_NOTHING = nullcontext()


def check_tensor_names(task: nn.Module) -> None:
    """Raise `UserError` if a part of the model and another part of the task have the same name."""
    parameters = task.named_parameters(remove_duplicate=False)
    names = set()
    for name, _ in chain(parameters, task.named_buffers(remove_duplicate=False)):
        if name in names:
            raise UserError(f"{type(task).__name__} and its model both have a tensor called {name}; rename one of them")
        names.add(name)


class ModelHolder(nn.Module):
    """A module whose parts and tensors within `model` are called as in the model itself, without `model.`."""

    model: nn.Module

    def named_modules(
        self,
        *args: Any,
        **options: Any,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Like `nn.Module.named_modules`, without the `model.` prefix."""
        for name, module in super().named_modules(*args, **options):
            if name == "model":
                name = ""
            yield name.removeprefix("model."), module

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Like `nn.Module.state_dict`, without the `model.` prefix."""
        state = super().state_dict(*args, **options)
        return {name.removeprefix("model."): value for name, value in state.items()}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Like `nn.Module.load_state_dict`, with the names of `state_dict`."""
        full = {name.removeprefix("model."): name for name in super().state_dict()}
        renamed = {full.get(name, name): value for name, value in state.items()}
        return super().load_state_dict(renamed, strict, assign)


class Strategy:
    """A prepared task, and how processes train it. This class: a single process.

    Attributes:
        about: how it was prepared, in a few words for the log and the checkpoint.
        task: without wrappers, so names have no prefix.
        precision: of the forward pass.
        lockstep_forward: whether each forward pass needs all processes, so that all must make the same number of them.
        copy_gradients: whether the next backward pass overwrites their memory, as CUDA graphs do.
    """

    lockstep_forward = False
    copy_gradients = False

    def __init__(
        self,
        task: nn.Module,
        precision: Precision,
        about: str = "whole",
    ) -> None:
        self.about = about
        self.task = task
        self.precision = precision

    def wrap(self, trained: Sequence[nn.Parameter]) -> nn.Module:
        """Return the module to call in an update of these parameters. Every process must call this."""
        return self.task

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of a wrapped task average gradients over ranks if `enabled`."""
        return _NOTHING

    def shard_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of a checkpoint, with its tensors sharded as this strategy needs them."""
        return state


class Replicated(Strategy):
    """Every process holds the whole task; gradients are averaged during the backward pass (DDP)."""

    def __init__(self, task: nn.Module, precision: Precision, config: DistConfig) -> None:
        super().__init__(task, precision)
        self._config = config

    def wrap(self, trained: Sequence[nn.Parameter]) -> nn.Module:
        config = self._config
        chosen = set(trained)
        ignored = list(own_buffers(self.task))
        for name, parameter in self.task.named_parameters(remove_duplicate=False):  # DDP looks for each name
            if parameter not in chosen:
                ignored.append(name)
                if "." not in name:  # DDP writes a parameter of the task itself with a dot in front
                    ignored.append(f".{name}")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.task, ignored)
        wrapped = DistributedDataParallel(
            self.task,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=True,
        )
        wrapped.broadcast_buffers = config.broadcast_buffers  # the argument's name depends on PyTorch's version
        return wrapped

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        if not enabled and isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return _NOTHING


def warm_up_ddp(
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    loss: Callable[[], Tensor],
    rank: Rank,
) -> None:
    """Run one backward pass and discard its result: weights, buffers and random generators stay as they were.

    DDP reduces gradients in one order in its first backward and in another from the second on. A resumed run would
    use the first order again and, with three ranks or more, add up in another order than the uninterrupted run.

    Raises:
        UserError: a trained parameter gets no gradient on some rank. Raised on all ranks; DDP would only wait.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    model.train()
    with random_state_unchanged(rank.device), buffers_unchanged(model.module):
        if not (model.find_unused_parameters or model.static_graph):
            with model.no_sync():  # otherwise DDP would wait forever for a missing gradient
                loss().backward()
            unused = gather_objects(without_gradient(model.module, trained), rank)
            names = list(dict.fromkeys(chain.from_iterable(unused)))
            if names:
                raise UserError(
                    f"{len(names)} parameters get no gradient on some rank in a first step, and DDP would wait for it: "
                    f"{join_names(names)}.\n  Use them in the model's forward and in the loss, or freeze "
                    "(prepare.freeze); if which are used changes from batch to batch: "
                    "--dist.find_unused_parameters true"
                )
            model.zero_grad(set_to_none=True)
        loss().backward()
    model.zero_grad(set_to_none=True)
