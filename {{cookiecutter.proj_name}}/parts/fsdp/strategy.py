"""A sharded model: each process holds a part of every weight, gradient and moment (FSDP2)."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common.base import parts
from common.base.errors import UserError
from common.base.nested import map_leaves
from common.distributed import Rank, has_streams, share_buffers
from common.distributed.collectives import is_sharded, local
from common.model.prepare import norms_with_statistics
from common.model.strategy import ModelHolder, Strategy
from common.optim.precision import Precision
from parts.fsdp.config import FsdpConfig, PrepareConfig


class Sharded(Strategy):
    """Every weight is split along its first dimension; the weights of a block are gathered while it computes.

    Args:
        task: on the CPU; it moves to the device block by block, and is never there as a whole.
        blocks: modules gathered one at a time; the rest of the model is gathered at once, as is the rest of the task.
        processes: the section `dist`: how many share a copy of the model, and whether all get rank 0's buffers before
            each training forward.
    """

    lockstep_forward = True

    def __init__(
        self,
        task: ModelHolder,
        blocks: Iterable[nn.Module],
        precision: Precision,
        prepare: PrepareConfig,
        processes: Any,
        rank: Rank,
    ) -> None:
        config = prepare.fsdp
        mesh = _mesh(processes, rank)
        self.rank = rank
        model = task.model
        policy = _policy(config, precision, model)
        offload = CPUOffloadPolicy(pin_memory=has_streams(rank.device)) if config.cpu_offload else OffloadPolicy()
        holding = [block for block in blocks if any(True for _ in block.parameters())]
        shard = partial(fully_shard, mesh=mesh, offload_policy=offload)
        inner = replace(policy, output_dtype=None)
        for block in holding:
            shard(block, mp_policy=inner, reshard_after_forward=config.reshard_after_forward)
        shard(model, mp_policy=policy, reshard_after_forward=False)
        shard(task)  # losses and all else compute in their own format
        about = f"sharded, {len(holding)} blocks" + (f", {mesh.size(0)} copies" if mesh.ndim > 1 else "")
        super().__init__(task, Precision() if policy.param_dtype else precision, about)
        task.register_forward_hook(self._reshard_without_gradient)
        if processes.broadcast_buffers and any(True for _ in task.buffers()):
            task.register_forward_pre_hook(self._share_buffers_in_training)
        mine = sum(local(parameter).numel() for parameter in task.parameters())
        logger.info("fsdp: model {} and the rest, {:,} parameters on each rank", self.about, mine)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        for module in self._sharded_modules():
            module.set_requires_gradient_sync(enabled, recurse=False)
        return nullcontext()

    def shard_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        live = self.task.state_dict()
        groups = state["optimizer"]["param_groups"] if "optimizer" in state else []
        names = [name for group in groups for name in group["param_names"]]  # indexed by the optimizer's numbers

        def shard(value: Any, path: tuple[Any, ...]) -> Any:
            match path:
                case ("model" | "task", name) | (parts.AVERAGE, "shadow", name):
                    return _like(live.get(name), value)
                case ("optimizer", "state", number, _):
                    return _like(live.get(names[number]), value)
            return value

        return dict(map_leaves(state, shard))

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.task.modules() if isinstance(module, FSDPModule)]

    def _reshard_without_gradient(self, task: nn.Module, inputs: Any, output: Any) -> None:
        """Free gathered weights after an evaluation: nothing else would, and parameter names would refer to them."""
        if not torch.is_grad_enabled():
            for module in self._sharded_modules():
                module.reshard()

    def _share_buffers_in_training(self, task: nn.Module, inputs: Any) -> None:
        if task.training and torch.is_grad_enabled():
            share_buffers(task, self.rank)


def _mesh(config: Any, rank: Rank) -> DeviceMesh:
    """Return all processes in a row; or a row for each copy of the model, which averages its gradients with the others.

    Not by init_device_mesh, which would choose the device by the local rank.
    """
    assert dist.group.WORLD is not None
    size = config.shard_size or rank.world_size
    if size == rank.world_size:
        return DeviceMesh.from_group(dist.group.WORLD, rank.device.type)
    if rank.world_size % size:
        raise UserError(
            f"dist.shard_size: {rank.world_size} processes cannot be divided into groups of {size}; "
            "usually it is the number of processes of a node"
        )
    copies = torch.arange(rank.world_size).view(-1, size)
    timeout = timedelta(seconds=config.timeout)
    groups = [dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)[0] for ranks in (copies.T, copies)]
    return DeviceMesh.from_group(groups, rank.device.type, mesh=copies, mesh_dim_names=("copy", "shard"))


def _policy(config: FsdpConfig, precision: Precision, model: nn.Module) -> MixedPrecisionPolicy:
    """Return the formats to compute in. Raises `UserError` for formats that do not go together."""
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
    if not narrow:
        return MixedPrecisionPolicy()
    # Gradients are summed, and losses computed, in 32 bits.
    return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def _like(live: Any, value: Any) -> Any:
    """`value`, a whole tensor on every process, sharded like `live`; unchanged if that does not apply."""
    if not is_sharded(live) or not isinstance(value, Tensor) or value.shape != live.shape:
        return value
    mesh = live.device_mesh
    rows = -(-value.shape[0] // mesh.size(mesh.ndim - 1))
    first = rows * mesh.get_local_rank(mesh.ndim - 1)
    part = value[first : first + rows].to(local(live).device, copy=True)
    return DTensor.from_local(part, mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride())
