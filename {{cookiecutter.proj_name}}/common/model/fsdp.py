"""A sharded model: each process holds a part of every weight, gradient and moment (FSDP2)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from common.base.errors import UserError
from common.checkpoint import gathered
from common.distributed import Rank, share_buffers
from common.distributed.sharded import is_sharded, local
from common.model.blocks import norms_with_statistics
from common.model.config import FsdpConfig
from common.model.strategy import Strategy
from common.optim.precision import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Sharded(Strategy):
    """Every weight is split along its first dimension; a block's are gathered while it computes.

    Args:
        model: on the CPU; it moves to the device block by block, so that it never lies there whole.
        blocks: gathered one at a time; the rest of the model is gathered at once.
        broadcast: give all processes rank 0's buffers before each training forward, as DDP does.
    """

    lockstep_forward = True

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        precision: Precision,
        config: FsdpConfig,
        *,
        broadcast: bool,
        rank: Rank,
    ) -> None:
        # Not init_device_mesh, which would choose the device by the local rank.
        assert dist.group.WORLD is not None
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, rank.device.type)
        self.rank = rank
        policy = _policy(config, precision, model)
        offload = CPUOffloadPolicy(pin_memory=rank.device.type == "cuda") if config.cpu_offload else OffloadPolicy()
        holding = [block for block in blocks if any(True for _ in block.parameters())]
        for block in holding:
            fully_shard(
                block,
                mesh=self.mesh,
                mp_policy=replace(policy, output_dtype=None),
                offload_policy=offload,
                reshard_after_forward=config.reshard_after_forward,
            )
        fully_shard(model, mesh=self.mesh, mp_policy=policy, offload_policy=offload)
        super().__init__(model, Precision() if policy.param_dtype else precision, f"sharded, {len(holding)} blocks")
        model.register_forward_hook(self._reshard_without_gradient)
        if broadcast and any(True for _ in model.buffers()):
            model.register_forward_pre_hook(self._share_buffers_in_training)
        mine = sum(local(parameter).numel() for parameter in model.parameters())
        logger.info("fsdp: model {} and the rest, {:,} of its numbers on each rank", self.about, mine)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        for module in self._sharded_modules():
            module.set_requires_gradient_sync(enabled, recurse=False)
        return nullcontext()

    def shard_state(self, state: Mapping[str, Any], source: Path) -> Mapping[str, Any]:
        loaded = dict(gathered(state, source, self._empty, self.rank))
        live = self.module.state_dict()
        loaded["model"] = _sharded(loaded["model"], live)
        if "shadow" in loaded["ema"]:
            loaded["ema"] = {**loaded["ema"], "shadow": _sharded(loaded["ema"]["shadow"], live)}
        if "optimizer" in loaded:  # not where weights alone were wanted
            loaded["optimizer"] = _sharded_optimizer(loaded["optimizer"], live)
        return loaded

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A sharded tensor with nothing in it yet, as FSDP would split a weight of this shape."""
        rows = -(-shape[0] // self.rank.world_size)
        mine = max(0, min(rows, shape[0] - self.rank.rank * rows))
        device = next(local(parameter).device for parameter in self.module.parameters())
        part = torch.empty((mine, *shape[1:]), dtype=dtype, device=device)
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _reshard_without_gradient(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """After an evaluation, nothing else would free what was gathered; and names would lead to gathered weights."""
        if not torch.is_grad_enabled():
            for module in self._sharded_modules():
                module.reshard()

    def _share_buffers_in_training(self, model: nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            share_buffers(model, self.rank)


def _policy(config: FsdpConfig, precision: Precision, model: nn.Module) -> MixedPrecisionPolicy:
    """What to compute in. Raises `UserError` for formats that do not go together."""
    has_norms = bool(norms_with_statistics(model))
    narrow = config.param_dtype == "bf16"
    if narrow and (has_norms or precision.mode in ("fp16", "fp64")):
        raise UserError(
            "prepare.fsdp.param_dtype bf16 goes with precision.mode bf16 and fp32 only, and the running statistics of "
            "batch norm need 32 bits; use auto or own"
        )
    if config.cpu_offload and precision.mode == "fp16":
        raise UserError("prepare.fsdp.cpu_offload: the loss scaling of precision.mode fp16 needs the device; use bf16")
    if config.param_dtype == "auto" and precision.mode == "bf16":
        narrow = not has_norms
        if has_norms:
            logger.info("prepare.fsdp: the model has batch norm, so weights stay 32 bits, under autocast")
    wide = torch.float32 if narrow else None
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=_DTYPES.get(config.reduce_dtype, wide),
        output_dtype=_DTYPES.get(config.output_dtype, wide),
    )


def _sharded(weights: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _like(live.get(name), value) for name, value in weights.items()}


def _sharded_optimizer(state: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with its tensors sharded as the parameters are that they belong to."""
    names = {
        index: name
        for group in state["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }
    states = {
        index: {key: _like(live.get(names[index]), value) for key, value in each.items()}
        for index, each in state["state"].items()
    }
    return {**state, "state": states}


def _like(live: Any, value: Any) -> Any:
    """`value`, a whole tensor on every process, sharded as `live` is; as it is where that does not apply."""
    if not is_sharded(live) or not isinstance(value, Tensor) or is_sharded(value) or value.shape != live.shape:
        return value
    rows = -(-value.shape[0] // live.device_mesh.size())
    first = rows * live.device_mesh.get_local_rank()
    part = value[first : first + rows].to(local(live).device, copy=True)
    return DTensor.from_local(
        part, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )
