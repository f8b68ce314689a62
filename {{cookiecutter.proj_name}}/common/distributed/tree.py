"""Sums along a fixed binary tree: the order of additions, and so every bit, is the same on any number of processes."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.base.errors import UserError
from common.distributed.collectives import LaterMax
from common.distributed.rank import Rank

Terms = Sequence[Tensor | None]
"""What one micro-batch adds to each of several sums; None: nothing."""


def leaves_here(leaves: int, rank: Rank) -> int:
    """Return how many of the tree's leaves each process computes: a whole branch.

    Raises:
        UserError: the processes cannot share the tree.
    """
    most = leaves & -leaves
    if most % rank.world_size:  # the divisors of a power of two are the smaller ones
        counts = ", ".join(str(1 << power) for power in range(most.bit_length()))
        raise UserError(
            f"dist.reduction fixed: optim.accumulate {leaves} micro-batches can be computed by {counts} process(es), "
            f"but not by {rank.world_size}. It counts those of a step over all processes: use 8 to be free to choose "
            "1, 2, 4 or 8 of them, with a batch_size that gives a step the samples that you want"
        )
    return leaves // rank.world_size


class TreeSum:
    """Sums the terms of consecutive leaves, given one by one; holds log2(leaves) + 1 sets of terms at most.

    The tree of `odd` x 2^k leaves: each `odd` neighbours are added one after the other, and their sums in pairs, pairs
    of pairs, and so on. So the tree over a process' leaves is a branch of the tree over all leaves.
    """

    def __init__(self, odd: int) -> None:
        self._odd, self._count = odd, 0
        self._sums: list[list[Tensor | None]] = []  # of finished branches, the largest first

    def add(self, terms: Terms) -> None:
        """Add the terms of the next leaf. The sum takes the tensors over, and may change them."""
        if self._count % self._odd:
            _add(self._sums[-1], terms)
        else:
            self._sums.append(list(terms))
        self._count += 1
        branches, rest = divmod(self._count, self._odd)
        while not (rest or branches % 2):  # as the carries of a binary counter
            right = self._sums.pop()
            _add(self._sums[-1], right)
            branches //= 2

    def result(self) -> list[Tensor | None]:
        """Return the sums once all leaves were added, and begin anew."""
        (total,), self._sums, self._count = self._sums, [], 0
        return total


@torch.no_grad()
def _add(total: list[Tensor | None], terms: Terms) -> None:
    both = [(a, b) for a, b in zip(total, terms, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    total[:] = [b if a is None else a for a, b in zip(total, terms, strict=True)]


@torch.no_grad()
def sum_of_branches(terms: Terms, like: Sequence[Tensor], rank: Rank, bucket_mb: float) -> list[Tensor | None]:
    """Sum the processes' branches along the rest of the tree; every process gets the result, in its own tensors.

    Each process adds one shard of every tensor: shards are exchanged, added, and gathered, which is the traffic of an
    all-reduce. Every process must call this, with terms for the same sums, shaped `like` these.
    """
    if rank.is_single_process:
        return list(terms)
    present = LaterMax([int(term is not None) for term in terms], rank).read()
    # -0.0 is the number that changes nothing when added: 0.0 would change -0.0.
    own = [
        (torch.zeros_like(other).neg_() if term is None else term) if is_present else None
        for term, other, is_present in zip(terms, like, present, strict=True)
    ]
    for bucket in _buckets([term for term in own if term is not None], bucket_mb * 1e6):
        numbers = torch.cat([term.reshape(-1) for term in bucket])
        padding = numbers.new_zeros(-len(numbers) % rank.world_size)
        flat = torch.cat([numbers, padding]).view(torch.uint8)  # bytes: gloo does not exchange every type of number
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        branches = received.view(numbers.dtype).view(rank.world_size, -1)
        while len(branches) > 1:
            branches = branches[0::2] + branches[1::2]
        dist.all_gather(list(flat.chunk(rank.world_size)), branches[0].view(torch.uint8))
        sums = flat.view(numbers.dtype)[: len(numbers)].split([term.numel() for term in bucket])
        for term, total in zip(bucket, sums, strict=True):
            term.copy_(total.view(term.shape))
    return own


def _buckets(tensors: Sequence[Tensor], most: float) -> Iterator[list[Tensor]]:
    """Yield neighbours of one type that have up to `most` bytes together; a larger tensor on its own."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(each.nbytes for each in bucket) + tensor.nbytes
        if bucket and (tensor.dtype != bucket[0].dtype or size > most):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
