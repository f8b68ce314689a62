"""What a forward pass keeps for its backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.distributed.sharded import local


@contextmanager
def kept_bytes(task: nn.Module) -> Iterator[list[int]]:
    """Yield a list, to which each backward pass of the block adds the bytes that were kept for it.

    A tensor counts once, weights and buffers do not.
    """
    held = {local(tensor).untyped_storage().data_ptr() for tensor in (*task.parameters(), *task.buffers())}
    kept, sums = dict[int, int](), [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        sums.append(sum(kept.values()))
        kept.clear()  # counted once, when the backward pass begins
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield sums
