"""Which number format the forward pass computes in, and the loss scaling that the narrowest one needs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.config import section
from common.data.move import map_tensors

Closure = Callable[[], Any]


@section
class PrecisionConfig:
    """Number formats."""

    mode: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"],
        Field(description="bf16, fp16: mixed with fp32 weights; fp16 scales the loss; fp64: everything, for checks"),
    ] = "fp32"
    tf32: Annotated[
        bool | None,
        Field(description="whether NVIDIA GPUs may shorten fp32 products to TF32, faster; null leaves torch's setting"),
    ] = None


class Precision:
    """32 bits throughout; the base of the other modes. The same calls in the same order serve all of them.

    with precision.autocast(): loss = ...; then backward, unscale, clip, step.
    """

    def __init__(self) -> None:
        self._context: AbstractContextManager[Any] = nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass and the loss."""
        return self._context

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a scalar."""
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true size, before they are clipped or looked at. Once per optimizer step."""

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Update the weights. False when the step was skipped: then nothing that follows it counts or moves."""
        optimizer.step(closure)
        return True

    def cast(self, model: nn.Module) -> nn.Module:
        """The model with weights of this precision. Call it before the optimizer is built."""
        return model

    def cast_batch(self, batch: Any) -> Any:
        """A batch (nested dicts, lists, tuples of tensors) whose floating point tensors are of this precision."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; empty unless the loss is scaled."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. That of another mode is left behind."""


class DoublePrecision(Precision):
    """64 bits throughout, to tell a rounding error from a mistake."""

    def cast(self, model: nn.Module) -> nn.Module:
        return model.double()

    def cast_batch(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


class BrainPrecision(Precision):
    """bfloat16 where torch holds it safe: the range of 32 bits, so that no scaling is needed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type

    def autocast(self) -> AbstractContextManager[Any]:
        # A new one each time (1 us): the object remembers what it replaced, and so cannot be nested in itself.
        return torch.autocast(self._device_type, torch.bfloat16)


class HalfPrecision(Precision):
    """float16 where torch holds it safe. Its small gradients would vanish, so the loss is scaled up."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._scaler = torch.amp.GradScaler(device.type)
        self._scale: float = self._scaler.get_scale()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, torch.float16)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Raises `UserError` for an optimizer that computes the loss again: its gradients would escape the scaling."""
        if closure is not None:
            raise UserError(
                f"precision.mode fp16 cannot scale the loss inside {type(optimizer).__name__}; use bf16 or fp32 with it"
            )
        self._scaler.step(optimizer)
        self._scaler.update()
        # Waits for the device, as the scaler itself does for most optimizers. The scale only falls after infinities.
        before, self._scale = self._scale, self._scaler.get_scale()
        return self._scale >= before

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)
            self._scale = self._scaler.get_scale()


def build_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    """The configured precision on `device`. Sets torch's process-wide TF32 switches when `tf32` says so."""
    if config.tf32 is not None:
        _allow_tf32(config.tf32)
    if config.mode == "bf16":
        return BrainPrecision(device)
    if config.mode == "fp16":
        return HalfPrecision(device)
    return DoublePrecision() if config.mode == "fp64" else Precision()


def _allow_tf32(allowed: bool) -> None:
    # The older pair of switches: torch.compile reads these, and torch raises once the newer `fp32_precision` was set.
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
