"""Compare an operator with its reference.

    python -m custom.ops.compare scale_exp [SIZE ...] [--on-cpu [--sanitize]]

--on-cpu compiles the CUDA kernels for the CPU, where a wrong one can be found before there is a GPU; --sanitize adds a
run with AddressSanitizer and one with ThreadSanitizer.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from common.ops.load import Implementation
from common.ops.on_cpu import run_on_cpu
from custom.ops.cases import SIZES, cases, disagreements

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


def main(*words: str) -> None:
    """Print how the operator in a module of this folder differs from its reference, on a GPU if there is one.

    First in the cases of cases.py, then the table for one size (1024 x 1024 by default). The tensors are random, or
    those that `example_inputs(*size)` of the module returns. Settings have their defaults in the table, and others in
    the cases. Ends with code 1 if a case differs.

    Args:
        words: the operator's name, sizes and options, as on the command line.
    """
    package = import_module(str(__package__))
    names = [name for name in package.__all__ if name != "implementation"]
    options = [word for word in words if word.startswith("-")]
    name, *sizes = [word for word in words if word not in options] or [""]
    known = options in ([], ["--on-cpu"], ["--on-cpu", "--sanitize"])
    if name not in names or not known or not all(size.isdecimal() for size in sizes):
        sys.exit(f"usage: python -m {__package__}.compare {'|'.join(names)} [SIZE ...] [--on-cpu [--sanitize]]")
    if options:
        again = ["-m", f"{__package__}.compare", name, *sizes]
        sys.exit(run_on_cpu(Path(__file__).resolve().parent, again, sanitize="--sanitize" in options))
    module = import_module(f"{__package__}.{name}")
    operator = getattr(module, name)
    parameters = inspect.signature(operator).parameters.values()
    settings = {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}
    count = len(parameters) - len(settings)
    make = getattr(module, "example_inputs", lambda *size: [torch.randn(size) for _ in range(count)])
    size = [int(text) for text in sizes]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    library = os.environ.get("OPS_ON_CPU")
    if library is None:
        _say_what_runs(name, package.implementation, device)
    else:
        device = "cpu"
        _load(library, name)
    inputs = [[tensor.to(device) for tensor in make(*shape)] for shape in ([size] if size else SIZES)]
    # Defaults are often 0 or 1, and a kernel that ignores them would agree.
    tried = {key: value * 1.5 + 0.25 if isinstance(value, float) else value for key, value in settings.items()}
    try:
        wrong = disagreements(operator, module.reference, inputs, **tried)
    except ValueError:  # the operator does not take these
        tried = settings
        wrong = disagreements(operator, module.reference, inputs, **tried)
    total = len(list(cases(inputs)))
    with_settings = "".join(f", {key} = {value}" for key, value in tried.items())
    for text in wrong[:5]:
        print(f"  {text}")
    print(f"  {total - len(wrong)} of {total} cases agree{with_settings}")
    if library is None:
        large = [tensor.to(device) for tensor in make(*(size or (1024, 1024)))]
        print(compare(operator, module.reference, large, **settings))
    sys.exit(1 if wrong else 0)


def _say_what_runs(name: str, built: Implementation, device: str) -> None:
    print(f"{name}: {built}")
    if built.library is None or (device == "cuda" and not built.architectures):
        print("  there is no kernel to compare: below, the reference is compared with itself")


def _load(library: str, name: str) -> None:
    """Have the CUDA kernels, compiled for the CPU, run as those of the CPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN: what no thread writes shows
    torch.ops.load_library(library)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"custom_ops::{name}", "CPU"):
        sys.exit(f'{name}: no .cu in src has m.impl("{name}", ...) for CUDA: a misspelt name is no error there')


if __name__ == "__main__":
    main(*sys.argv[1:])
