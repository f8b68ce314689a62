"""Cases for any operator: its tensors in each precision, and in each way in which they can lie in memory."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.on_cpu import CASE

Operator = Callable[..., Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = ((3, 5), (1, 1), (0, 7), (37, 131))  # odd numbers; less and more than a block of 256 threads


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


LAYOUTS = (contiguous, transposed, sliced, expanded)


def disagreements(
    operator: Operator, reference: Operator, inputs: Sequence[Sequence[Tensor]], **settings: Any
) -> list[str]:
    """Compare values and gradients in every precision and layout, as closely as torch.testing.assert_close does.

    Args:
        inputs: for each size, the tensors of a call; float32.
        settings: the other arguments, in their order.

    Returns:
        What differs, a line for each case that does.
    """
    wrong = []
    for label, tensors in cases(inputs):
        if "OPS_ON_CPU" in os.environ:  # a kernel can end the program; then this is the last that it says
            print(f"{CASE}{label}", file=sys.stderr, flush=True)
        try:
            mine = _results(operator, tensors, settings)
        except RuntimeError as error:
            wrong.append(f"{label}: {str(error).splitlines()[0]}")
            continue
        names = ["values", *(f"gradient {number}" for number in range(1, len(tensors) + 1))]
        for name, one, other in zip(names, mine, _results(reference, tensors, settings), strict=True):
            try:
                torch.testing.assert_close(one, other, equal_nan=True)
            except AssertionError as error:
                said = str(error).split("\n")
                wrong.append(f"{label}: {name}: {', '.join(said[2:4]) or said[0]}")
                break
    return wrong


def _results(function: Operator, tensors: Sequence[Tensor], settings: dict[str, Any]) -> list[Tensor]:
    """Return values and gradients; those of the output, from -1 to 2, are different for each element."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, *settings.values())
    upstream = torch.linspace(-1, 2, output.numel(), device=output.device).to(output.dtype)
    return [output, *torch.autograd.grad(output, leaves, upstream.view(output.shape))]


def cases(inputs: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each case with its name."""
    for tensors in inputs:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                shape = " x ".join(map(str, tensors[0].shape))
                name = f"{str(dtype).removeprefix('torch.')} {shape} {layout.__name__}"
                yield name, [layout(tensor.to(dtype)) for tensor in tensors]
