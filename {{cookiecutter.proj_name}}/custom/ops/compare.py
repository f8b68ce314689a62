"""Compare an operator with its reference: python -m custom.ops.compare scale_exp [SIZE ...]"""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

Operator = Callable[..., Tensor]


def compare(operator: Operator, reference: Operator, inputs: Sequence[Tensor], **settings: Any) -> str:
    """Return a table of differences and times: `operator(*inputs, *settings)` against `reference(*inputs, *settings)`.

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
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves, *arguments), leaves, upstream)

    dtype = str(inputs[0].dtype).removeprefix("torch.")
    lines = [f"{tuple(inputs[0].shape)} {dtype} on {inputs[0].device}, {threads} threads"]
    lines.append(f"  {'':<10} {'difference':>10} {'operator':>12} {'reference':>12} {'speed-up':>9}")
    for name, measure in (("values", values), ("gradients", gradients)):
        difference = max(map(largest_difference, measure(operator), measure(reference)))
        mine, theirs = median_ms(measure, operator), median_ms(measure, reference)
        lines.append(f"  {name:<10} {difference:>10.1e} {mine:>9.3f} ms {theirs:>9.3f} ms {theirs / mine:>8.2f}x")
    corner = [item.detach()[tuple(slice(3) for _ in item.shape)].double().requires_grad_() for item in inputs]
    passed = torch.autograd.gradcheck(lambda *x: operator(*x, *arguments), corner)
    return "\n".join([*lines, f"  gradcheck: {'passed' if passed else 'failed'}"])


def median_ms(measure: Callable[[Operator], Any], function: Operator) -> float:
    """Median time of `measure(function)` in milliseconds, over at least 0.3 s of calls."""
    timer = Timer("run(function)", globals={"run": measure, "function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.3).median * 1e3


def largest_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference of two tensors; 0 where there are no elements."""
    return (first.double() - second.double()).abs().max().item() if first.numel() else 0.0


def main(name: str = "", *sizes: str) -> None:
    """Print the table for the operator in the module `name` of this folder, on a GPU if there is one.

    Its tensors are random, of the given size (1024 x 1024 by default), or those that `example_inputs(*size)` of the
    module returns; its settings have their defaults.
    """
    package = import_module(str(__package__))
    names = [name for name in package.__all__ if name != "implementation"]
    if name not in names or not all(size.isdecimal() for size in sizes):
        sys.exit(f"usage: python -m {__package__}.compare {'|'.join(names)} [SIZE ...]")
    module, size = import_module(f"{__package__}.{name}"), [int(size_text) for size_text in sizes or ("1024", "1024")]
    operator = getattr(module, name)
    parameters = inspect.signature(operator).parameters.values()
    settings = {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}
    count = len(parameters) - len(settings)
    make = getattr(module, "example_inputs", lambda *size: [torch.randn(size) for _ in range(count)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    built = package.implementation
    print(f"{name}: {built}")
    if built.library is None or (device == "cuda" and not built.architectures):
        print("  there is no kernel to compare: below, the reference is compared with itself")
    print(compare(operator, module.reference, [tensor.to(device) for tensor in make(*size)], **settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
