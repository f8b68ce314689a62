"""Check and convert the tensors of an operator before a kernel runs."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def check_tensors(operator: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, which must have one floating-point dtype and be on one device.

    Under autocast, tensors of several dtypes are converted to the widest, as for PyTorch's own functions.

    Args:
        operator: its name, for messages.

    Raises:
        ValueError: the tensors break one of these rules.
    """
    if torch.is_autocast_enabled(tensors[0].device.type):
        widest = tensors[0].dtype
        for tensor in tensors:
            widest = torch.promote_types(widest, tensor.dtype)
        tensors = tuple(tensor.to(widest) for tensor in tensors)
    dtypes = {tensor.dtype for tensor in tensors}
    devices = {tensor.device for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        given = " and ".join(str(tensor.dtype) for tensor in tensors)
        raise ValueError(f"{operator} takes tensors of one floating-point dtype, not {given}; use .to() or .float()")
    if len(devices) > 1:
        given = " and ".join(str(tensor.device) for tensor in tensors)
        raise ValueError(f"{operator} takes tensors on one device, not {given}")
    return tensors


def needs_reference(*tensors: Tensor) -> bool:
    """Return whether a derivative or a batch is asked for that PyTorch's custom operators cannot give.

    These are forward-mode derivatives, which would silently be 0, and all of `torch.func` (grad, jvp, hessian, vmap).
    The reference, being made of PyTorch's own functions, supports them all.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
