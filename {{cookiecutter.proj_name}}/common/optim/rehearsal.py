"""A trial of an optimizer unknown to the engine, before a run begins: its first steps, and a resume from them."""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.distributed.sharded import is_sharded, local

_STEPS = 6  # before and after the checkpoint


def rehearse(
    construct: Callable[[list[Any]], Optimizer], group: Mapping[str, Any], named: Iterable[tuple[str, Tensor]]
) -> None:
    """Try an optimizer on small parameters, and check that a checkpoint holds all of its state.

    Args:
        construct: builds it over a list of groups.
        group: the options of one.
        named: the parameters that it will train; it is tried on one for each number of dimensions.

    Raises:
        UserError: its steps fail, or those with sharded parameters. If a resumed run would differ, this is a warning.
    """
    by_dim = {parameter.dim(): (name, parameter) for name, parameter in named}
    small = {
        name: local(parameter).detach().new_full([max(1, min(size, 8)) for size in parameter.shape], 0.5)
        for name, parameter in by_dim.values()
    }
    if any(weight.is_meta for weight in small.values()):
        return

    def start(weights: Mapping[str, Tensor]) -> Optimizer:
        params = [(name, nn.Parameter(weight.clone())) for name, weight in weights.items()]
        optimizer = construct([{**group, "params": params}])
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    kind, how = type(start(small)).__name__, ""
    try:
        with torch.random.fork_rng(devices=[]):
            first, file = start(small), BytesIO()
            second = start(_train(first, 0))
            torch.save(first.state_dict(), file)
            file.seek(0)
            second.load_state_dict(torch.load(file, weights_only=True))
            ends = _train(first, _STEPS), _train(second, _STEPS)
            if shards := {name: _shard(small[name], like) for name, like in by_dim.values() if is_sharded(like)}:
                how = ", sharded by dist.strategy fsdp (dist.strategy ddp keeps them whole)"
                _train(start(shards), 0)
    except Exception as error:
        raise UserError(f"optim_type {kind} failed when it was tried on small parameters{how}: {error}") from error
    if not all(torch.equal(ends[0][name], ends[1][name]) for name in small):
        rule = "keeps state outside state_dict()"
        logger.warning("optimizer {} {}: a resumed run will differ", kind, rule)


def _shard(part: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor  # imported already, where there is one

    return DTensor.from_local(part, like.device_mesh, like.placements)


def _train(optimizer: Optimizer, first: int) -> dict[str, Tensor]:
    """Take steps towards weights of 1, from step `first` on. Returns the weights by name."""
    weights = {
        name: weight
        for group in optimizer.param_groups
        for name, weight in zip(group["param_names"], group["params"], strict=True)
    }
    for step in range(first, first + _STEPS):
        torch.manual_seed(step)
        for weight in weights.values():
            weight.grad = (weight.detach() - 1) * (1 + step % 3)
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in weights.items()}
