"""Compares the results and the speed of an operator with those of its reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

Operator = Callable[..., Tensor]


def compare(operator: Operator, reference: Operator, inputs: Sequence[Tensor], **settings: Any) -> str:
    """A table of differences and times: `operator(*inputs, *settings)` against `reference(*inputs, *settings)`.

    Differences are the largest over all elements; gradients are computed for a random upstream gradient. Times
    are medians, with as many threads as PyTorch uses. `gradcheck` compares a corner of the inputs with finite
    differences in float64.
    """
    arguments, threads = tuple(settings.values()), torch.get_num_threads()
    upstream = torch.randn_like(inputs[0])

    def values(function: Operator) -> list[Tensor]:
        with torch.no_grad():
            return [function(*inputs, *arguments)]

    def gradients(function: Operator) -> Sequence[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*leaves, *arguments), leaves, upstream)

    dtype = str(inputs[0].dtype).removeprefix("torch.")
    lines = [f"{tuple(inputs[0].shape)} {dtype} on {inputs[0].device}, {threads} threads"]
    lines.append(f"  {'':<10} {'difference':>10} {'operator':>12} {'reference':>12} {'speed-up':>9}")
    for name, measure in (("values", values), ("gradients", gradients)):
        difference = max(map(largest_difference, measure(operator), measure(reference)))
        mine, theirs = median_ms(measure, operator), median_ms(measure, reference)
        lines.append(f"  {name:<10} {difference:>10.1e} {mine:>9.3f} ms {theirs:>9.3f} ms {theirs / mine:>8.2f}x")
    corner = [each.detach()[tuple(slice(3) for _ in each.shape)].double().requires_grad_() for each in inputs]
    passed = torch.autograd.gradcheck(lambda *x: operator(*x, *arguments), corner)
    return "\n".join([*lines, f"  gradcheck: {'passed' if passed else 'failed'}"])


def median_ms(measure: Callable[[Operator], Any], function: Operator) -> float:
    """Median time of `measure(function)` in milliseconds, over at least 0.3 s of calls."""
    timer = Timer("run(function)", globals={"run": measure, "function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.3).median * 1e3


def largest_difference(first: Tensor, second: Tensor) -> float:
    """The largest absolute difference of two tensors; 0 where there are no elements."""
    return (first.double() - second.double()).abs().max().item() if first.numel() else 0.0
