"""Compare an operator with its reference: python -m custom.ops.compare scale_exp [SIZE ...]

First values and gradients, in every precision and in each way in which a tensor can lie in memory, then the times.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from custom import ops as package

Operator = Callable[..., Tensor]
Case = tuple[str, list[Any]]  # its name, and the arguments: tensors and settings
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES: Sequence[Sequence[int]] = (
    (3, 5),
    (1, 1),
    (0, 7),
    (37, 131),
)  # odd numbers; less and more than a block of 256 threads


def contiguous(x: Tensor) -> Tensor:
    """Return x itself."""
    return x


def transposed(x: Tensor) -> Tensor:
    """Return the same values; the last dimension is not the one whose neighbours are neighbours in memory."""
    if x.dim() < 2:
        return x
    return x.mT.contiguous().mT


def sliced(x: Tensor) -> Tensor:
    """Return the same values as every second element of a larger tensor."""
    larger = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
    larger[..., 1::2] = x
    return larger[..., 1::2]


def expanded(x: Tensor) -> Tensor:
    """Return the first row in place of each; all are in the same memory."""
    return x[:1].expand(x.shape)


def cases(make: Callable[..., list[Any]], sizes: Sequence[Sequence[int]], device: str) -> Iterator[Case]:
    """Yield the arguments `make(*size)` for each size, in each precision, layout by layout."""
    for size in sizes:
        arguments = make(*size)
        for dtype in DTYPES:
            for layout in (contiguous, transposed, sliced, expanded):
                tried = []
                for argument in arguments:
                    if isinstance(argument, Tensor):
                        argument = layout(argument.to(device, dtype))
                    tried.append(argument)
                precision = str(dtype).removeprefix("torch.")
                yield f"{precision} {' x '.join(map(str, size))} {layout.__name__}", tried


def difference(operator: Operator, reference: Operator, arguments: Sequence[Any]) -> str:
    """Return the first difference of values and gradients, as torch.testing.assert_close says it; or nothing."""
    upstream = example_gradient(reference(*arguments))
    try:
        results = values_and_gradients(operator, arguments, upstream)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    expected = values_and_gradients(reference, arguments, upstream)
    for number, one in enumerate(results):
        try:
            torch.testing.assert_close(one, expected[number], equal_nan=True)
        except AssertionError as error:
            what = "values"
            if number > 0:
                what = f"gradient {number}"
            return f"{what}: {' '.join(str(error).split())}"
    return ""


def values_and_gradients(function: Operator, arguments: Sequence[Any], upstream: Tensor) -> list[Tensor]:
    """Return the output of `function(*arguments)`, and the gradient for each tensor among them."""
    leaves = []
    given = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument = argument.detach().requires_grad_()
            leaves.append(argument)
        given.append(argument)
    output = function(*given)
    return [output, *torch.autograd.grad(output, leaves, upstream)]


def example_gradient(output: Tensor) -> Tensor:
    """Return a gradient like the output, from -1 to 2, different for each element."""
    gradient = torch.linspace(-1, 2, output.numel(), device=output.device)
    return gradient.to(output.dtype).view(output.shape)


def times(operator: Operator, reference: Operator, arguments: Sequence[Any]) -> str:
    """Return the median times of forward and backward together, with PyTorch's number of threads."""
    output = reference(*arguments)
    known = {"run": values_and_gradients, "arguments": arguments, "upstream": example_gradient(output)}
    found = []
    for function in (operator, reference):
        known["function"] = function
        timer = Timer("run(function, arguments, upstream)", globals=known, num_threads=torch.get_num_threads())
        found.append(timer.blocked_autorange(min_run_time=0.3).median * 1e3)
    what = f"{tuple(output.shape)} {output.dtype} on {output.device}, forward and backward"
    return f"  {what}: {found[0]:.3f} ms, the reference {found[1]:.3f} ms, speed-up {found[1] / found[0]:.2f}"


def load(words: Sequence[str], program: str) -> tuple[Operator, ModuleType, list[int]]:
    """Return the operator that the words name, the module with its reference, and the size, which may be empty."""
    names = [name for name in package.__all__ if name != "implementation"]
    if not words or words[0] not in names or not all(word.isdecimal() for word in words[1:]):
        sys.exit(f"usage: python -m {program} {'|'.join(names)} [SIZE ...]")
    module = import_module(f"{package.__name__}.{words[0]}")
    return getattr(module, words[0]), module, [int(word) for word in words[1:]]


def try_cases(operator: Operator, reference: Operator, tried: Iterable[Case]) -> int:
    """Print which cases differ. Returns how many."""
    total = 0
    wrong = []
    for name, arguments in tried:
        total += 1
        found = difference(operator, reference, arguments)
        if found:
            wrong.append(f"  {name}: {found}")
    lines = [*wrong[:5], f"  {total - len(wrong)} of {total} cases agree"]
    print("\n".join(lines))
    return len(wrong)


def main(*words: str) -> None:
    """Compare on a GPU, if there is one; in cases of several sizes and times of 1024 x 1024, or all of the given size.

    `example_inputs(*size)` in the operator's file returns the arguments: settings that are no defaults, as a kernel
    that ignores them would agree.
    """
    operator, module, size = load(words, f"{package.__name__}.compare")
    built = package.implementation
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    print(f"{words[0]}: {built}")
    if built.library is None or (device == "cuda" and not built.architectures):
        print("  there is no kernel to compare: below, the reference is compared with itself")
    sizes = SIZES
    if size:
        sizes = (size,)
    wrong = try_cases(operator, module.reference, cases(module.example_inputs, sizes, device))
    with torch.device(device):
        arguments = module.example_inputs(*(size or (1024, 1024)))
    print(times(operator, module.reference, arguments))
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
