"""Activation checkpointing. Parameter names do not change."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(module: nn.Module) -> None:
    """Make a module keep only the inputs of its forward, which is computed again in the backward pass.

    Gradients stay the same: dropout draws the same numbers again, and running statistics are updated once. The module's
    `forward` is replaced, not the module, so that no name of a parameter changes.
    """
    forward = module.forward
    norms = norms_with_statistics(module)

    @functools.wraps(forward)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # torch.compile leaves the update of statistics out of the recomputation by itself.
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling():
            options["context_fn"] = lambda: (nullcontext(), _keep_statistics(norms))
        call = functools.partial(forward, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, **options)

    setattr(module, "forward", recompute)  # noqa: B010 - to the type checker a method cannot be replaced


def norms_with_statistics(model: nn.Module) -> list[_NormBase]:
    """Batch norms and the like that keep running statistics."""
    norms = []
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            norms.append(module)
    return norms


@contextmanager
def _keep_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Within this context norms compute as usual, but their running statistics do not change."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum = 0.0  # weight of the new batch
        if count is not None:
            norm.num_batches_tracked = count.clone()
    try:
        with _disable_current_modes():  # a counter of operations would count them twice
            yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked = count
