"""The precision of the forward pass, and the loss scaling that fp16 needs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.nested import map_tensors
from common.config import section


@section
class PrecisionConfig:
    """Number formats."""

    mode: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16, fp16: mixed with fp32 weights; fp16 scales the loss; fp64: everything, for checks"""
    tf32: bool | None = None
    """fp32 products in TF32 on NVIDIA GPUs; null: as torch has it"""


class Precision:
    """The precision of a run.

    Attributes:
        autocast: makes the context of the forward pass and the loss.
        scaler: scales the loss, and gradients back before they are clipped; disabled unless the mode needs that.
    """

    def __init__(self, mode: str = "fp32", device_type: str = "cpu") -> None:
        self.mode = mode
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
        if narrow is not None:
            self.autocast = partial(torch.autocast, device_type, narrow)
        # In the small range of float16, gradients would vanish.
        self.scaler = torch.amp.GradScaler(device_type, enabled=mode == "fp16")

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights. Returns False if the step was skipped (fp16: gradients that are not finite).

        With fp16, gradients must have been unscaled by `scaler.unscale_`. It waits for the device, once.
        """
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        found = self.scaler._found_inf_per_device(optimizer)
        is_taken = not any(map(float, found.values()))
        if is_taken:  # as `scaler.step`, which does not say whether it stepped
            optimizer.step()
        self.scaler.update()
        return is_taken

    def cast(self, model: nn.Module) -> nn.Module:
        """Cast the model with weights of this precision. Call it before the optimizer is built."""
        if self.mode == "fp64":
            return model.double()
        return model

    def cast_batch(self, batch: Any) -> Any:
        """Cast the floating point tensors of a batch (nested dicts, lists, tuples of tensors) to this precision."""
        if self.mode != "fp64":
            return batch
        return map_tensors(batch, _doubled)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaler; empty unless the loss is scaled."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. A state of another mode has no effect."""
        if state:
            self.scaler.load_state_dict(state)


def _doubled(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.double()
    return tensor


def build_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    """Build the configured precision on `device`. Sets torch's process-wide TF32 switches when `tf32` says so."""
    if config.tf32 is not None:
        products = "highest"
        if config.tf32:
            products = "high"
        # The older pair of switches: torch.compile reads them, which fails once the newer `fp32_precision` was set.
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = config.tf32
    return Precision(config.mode, device.type)
