"""A process group for the device: gloo, on copies in host memory. It refuses tensors of the host, as NCCL does."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Done(dist.Work):
    """An exchange that has ended."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> Any:
        return self._future.value()


_Base: Any = dist.ProcessGroup  # its overloads are for other callers than torch.distributed


class Group(_Base):  # type: ignore[misc]
    """What DDP and the collectives of torch.distributed call."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = self._description = ""
        _let_fsdp_move()

    def getBackendName(self) -> str:
        return "emucl"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    def allreduce(self, tensors: Any, options: Any = None) -> Done:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        values = _on_host(given)
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        is_mean = operation == dist.ReduceOp.AVG
        plain: Any = dist.AllreduceOptions()
        plain.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        for value in values:
            self._gloo.allreduce([value], plain).wait()
            if is_mean:
                value /= self.size()
        return _back(given, values)

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Done:
        return self.allreduce(tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> Done:
        values = _on_host(tensors)
        self._gloo.broadcast(values, options).wait()
        return _back(tensors, values)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        results = [[torch.empty_like(tensor, device="cpu") for tensor in row] for row in outputs]
        self._gloo.allgather(results, _on_host(inputs)).wait()
        for row, values in zip(outputs, results, strict=True):
            _back(row, values)
        return Done(outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> Done:
        self.allgather([list(output.view(self.size(), *given.shape).unbind(0))], [given])
        return Done([output])

    def alltoall_base(self, output: Tensor, given: Tensor, to: Any, of: Any, options: Any = None) -> Done:
        result = torch.empty_like(output, device="cpu")
        self._gloo.alltoall_base(result, _on_host([given])[0], to, of).wait()
        return _back([output], [result])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any = None) -> Done:
        whole = given.detach().clone()
        self.allreduce([whole], options)
        with torch.no_grad():
            output.copy_(whole.view(self.size(), *output.shape)[self.rank()])
        return Done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return Done(outputs)

    all_gather_single = _allgather_base  # the names that torch.distributed calls
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, options: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done([])


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        if tensor.device.type != "emu":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    return [tensor.detach().cpu() for tensor in tensors]


def _back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Done:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.detach().copy_(value, non_blocking=True)
    return Done(tensors)


def _let_fsdp_move() -> None:
    """Have FSDP move tensors as `.to` does: `tensor.data =` takes no tensor of this kind of device."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    def move(parameters: Any, buffers: Any, device: Any) -> None:
        for tensor in [*parameters, *buffers]:
            if tensor.device != device and tensor.device.type != "meta":
                moved = tensor.detach().to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, moved)

    sharding: Any = _fully_shard
    sharding._get_modules_and_states.__globals__["_move_states_to_device"] = move


def register() -> None:
    """Make this group the default of the device."""
    dist.Backend.register_backend("emucl", Group, devices=["emu"])
