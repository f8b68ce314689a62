"""scale_exp(x, scale, shift) = scale * exp(-x) + shift: the full example, with its own backward kernel.

`python -m custom.ops.compare scale_exp [SIZE ...]` compares
kernels and reference: values, gradients, time.
"""

from typing import Any

import torch
from torch import Tensor

from common.ops.arguments import check_tensors, needs_reference


def reference(x: Tensor, scale: float, shift: float) -> Tensor:
    """Return the operator in plain PyTorch.

    The C++ and CUDA kernels must agree with it; without them, it runs itself.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision is for storage, not for arithmetic
    return (scale * torch.exp(-wide) + shift).to(x.dtype)


def reference_backward(grad: Tensor, x: Tensor, scale: float) -> Tensor:
    """Return the gradient for x: d/dx (scale * exp(-x) + shift) = -scale * exp(-x).

    It would be cheaper to save the output y and use shift - y. But if |shift| is much larger than scale * exp(-x), that
    difference has no correct digits.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (-scale * torch.exp(-wide) * grad).to(x.dtype)


# Two operators, each with kernels, so that the backward pass is a single launch, too. add_matrix.py explains the call.
operator = torch.library.custom_op("custom_ops::scale_exp", reference, mutates_args=())
operator_backward = torch.library.custom_op("custom_ops::scale_exp_backward", reference_backward, mutates_args=())


@operator.register_fake
def _shape(x: Tensor, scale: float, shift: float) -> Tensor:
    return torch.empty_like(x)


@operator_backward.register_fake
def _shape_backward(grad: Tensor, x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    """Called only if a gradient is needed; otherwise the forward pass keeps no tensor alive."""
    x, ctx.scale, _ = inputs
    ctx.save_for_backward(x)  # tensors go here, so that they are freed with the graph; numbers are attributes


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    return operator_backward(grad, x, ctx.scale), None, None  # one gradient per input; None for numbers


operator.register_autograd(_backward, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    grad, x, ctx.scale = inputs
    ctx.save_for_backward(grad, x)


def _double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """With the same kernel: it is linear in `grad`, and its derivative for x differs only in sign."""
    grad_output, x = ctx.saved_tensors
    return (
        operator_backward(grad, x, ctx.scale) if ctx.needs_input_grad[0] else None,
        operator_backward(grad * grad_output, x, -ctx.scale) if ctx.needs_input_grad[1] else None,
        None,
    )


operator_backward.register_autograd(_double_backward, setup_context=_save_backward)


def scale_exp(x: Tensor, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """scale * exp(-x) + shift, element by element.

    Args:
        x: any shape and strides; float16, bfloat16, float32 or float64.
        scale: a number, not a tensor, so it is not trained. To train a scale, multiply outside.
        shift: a number, too.

    Returns:
        A tensor like x. Half precision is computed in float32 and rounded once.

    Raises:
        ValueError: an argument breaks one of these rules.
    """
    (x,) = check_tensors("scale_exp", x)
    for name, value in (("scale", scale), ("shift", shift)):
        if not isinstance(value, (int, float)):
            raise ValueError(f"scale_exp: {name} must be a number, not {type(value).__name__}")
    if needs_reference(x):
        return reference(x, scale, shift)
    return operator(x, float(scale), float(shift))


def example_inputs(*size: int) -> list[Any]:
    """Return the arguments with which compare.py calls the operator."""
    return [torch.randn(size), 1.75, 0.25]
