"""Sums along a fixed binary tree: the order of additions, and so every bit, is the same on any number of processes."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from common.base.errors import UserError
from common.distributed.rank import Rank


def leaves_here(leaves: int, rank: Rank) -> int:
    """Return how many of the tree's leaves each process computes: a whole branch.

    Raises:
        UserError: the tree is not balanced, or the processes cannot share it.
    """
    if leaves & (leaves - 1) or leaves % rank.world_size:
        raise UserError(
            f"dist.reduction fixed: optim.accumulate is {leaves}. It counts the micro-batches of all processes, here "
            f"{rank.world_size}, and must be a power of two, as must they: with 8, a run can have 1, 2, 4 or 8 of them"
        )
    return leaves // rank.world_size


class TreeSum:
    """Sums the terms of consecutive leaves, which are given one by one; holds log2(leaves) + 1 sets of terms at most.

    Two neighbours are added, then pairs, pairs of pairs, and so on: a process' leaves make a branch of the whole tree.
    """

    def __init__(self) -> None:
        self._count, self._branches = 0, list[list[Tensor]]()  # those that are complete, the largest first

    def add(self, terms: Sequence[Tensor]) -> None:
        """Add the terms of the next leaf, one of each sum. They may be changed in place."""
        self._branches.append(list(terms))
        self._count = carry = self._count + 1
        while carry % 2 == 0:  # as in a binary counter
            right = self._branches.pop()
            torch._foreach_add_(self._branches[-1], right)
            carry //= 2

    def result(self) -> list[Tensor]:
        """Return the sums once all leaves were added, and begin anew."""
        (total,), self._branches, self._count = self._branches, [], 0
        return total


def sum_branches(terms: Sequence[Tensor], rank: Rank, bucket_mb: float) -> None:
    """Sum the terms of all processes' branches along the rest of the tree, in place. Every process must call this.

    Each process adds one shard of every sum: shards are exchanged, added, and gathered, the traffic of an all-reduce.
    """
    ends = accumulate(each.nbytes for each in terms)
    keyed = [((each.dtype, int(end / bucket_mb / 1e6)), each) for each, end in zip(terms, ends, strict=True)]
    for _, group in groupby([] if rank.is_single_process else keyed, key=lambda pair: pair[0]):
        bucket = [each for _, each in group]
        padding = bucket[0].new_zeros(-sum(each.numel() for each in bucket) % rank.world_size)
        flat = torch.cat([*(each.reshape(-1) for each in bucket), padding])
        numbers = flat.view(torch.uint8)  # gloo exchanges bytes of all types
        received = torch.empty_like(numbers)
        dist.all_to_all_single(received, numbers)
        branches = received.view(flat.dtype).view(rank.world_size, -1)
        while len(branches) > 1:
            branches = branches[0::2] + branches[1::2]
        dist.all_gather(list(numbers.chunk(rank.world_size)), branches[0].view(torch.uint8))
        for each, total in zip(bucket, flat.split([each.numel() for each in bucket] + [len(padding)]), strict=False):
            each.copy_(total.view(each.shape))
