"""add_matrix(a, b) = a + b for matrices: the smallest operator, to copy when yours has no settings.

`python -m custom.ops.compare add_matrix [SIZE ...]` compares
kernels and reference: values, gradients, time.
"""

from typing import Any

import torch
from torch import Tensor

from common.ops.arguments import check_tensors, needs_reference


def reference(a: Tensor, b: Tensor) -> Tensor:
    """Return the operator in plain PyTorch.

    The C++ and CUDA kernels must agree with it; without them, it runs itself.
    """
    return (a + b).contiguous()


# A call instead of the decorator, so that `reference` stays an ordinary function. This defines the operator
# torch.ops.custom_ops.add_matrix: its schema is the signature, and `reference` is its kernel on every device without a
# kernel of its own. Loading the library registers the kernels in src/ for CPU and CUDA under the same name.
operator = torch.library.custom_op("custom_ops::add_matrix", reference, mutates_args=())


@operator.register_fake
def _shape(a: Tensor, b: Tensor) -> Tensor:
    """The output without its values: torch.compile and torch.export call this with tensors that hold no data."""
    return a.new_empty(a.shape)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients: a sum's is that of each term; None for an input that needs none."""
    return (grad if ctx.needs_input_grad[0] else None, grad if ctx.needs_input_grad[1] else None)


operator.register_autograd(_backward)


def add_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Add two matrices of one size; nothing is broadcast.

    Args:
        a: (N, M), float16, bfloat16, float32 or float64.
        b: (N, M), on the same device, with the dtype of `a`. Under autocast, both are converted to the wider dtype.

    Returns:
        a + b, (N, M), contiguous. Half precision is added in float32 and rounded once.

    Raises:
        ValueError: an argument breaks one of these rules.
    """
    a, b = check_tensors("add_matrix", a, b)
    if a.dim() != 2 or a.shape != b.shape:
        raise ValueError(f"add_matrix takes two matrices of one size, not {tuple(a.shape)} and {tuple(b.shape)}")
    if needs_reference(a, b):
        return reference(a, b)
    return operator(a, b)


def example_inputs(*size: int) -> list[Any]:
    """Return the arguments with which compare.py calls the operator."""
    return [torch.randn(size), torch.randn(size)]
