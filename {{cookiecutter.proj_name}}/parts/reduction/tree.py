"""Sums along a fixed binary tree: the order of additions, and so every bit, is the same on any number of processes."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from common.base.errors import UserError
from common.distributed.launch import Rank

# The complete branches of a tree, the largest first: the number of their leaves, and the sums of their terms.
Branches = list[tuple[int, list[Tensor]]]


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


def add_leaf(branches: Branches, terms: list[Tensor]) -> None:
    """Add the terms of the next leaf, one of each sum, which may be changed in place.

    Two neighbours are added, then pairs, pairs of pairs, and so on: log2(leaves) + 1 sets of terms are held at most,
    and the leaves of a process make a branch of the whole tree.
    """
    leaves = 1
    while branches and branches[-1][0] == leaves:
        _, left = branches.pop()
        torch._foreach_add_(left, terms)
        leaves, terms = 2 * leaves, left
    branches.append((leaves, terms))


def sum_branches(terms: Sequence[Tensor], rank: Rank, bucket_mb: float) -> None:
    """Sum the terms of all processes' branches along the rest of the tree, in place. Every process must call this.

    Each process adds one shard of every sum: shards are exchanged, added, and gathered, the traffic of an all-reduce.
    """
    if rank.is_single_process:
        return
    ends = accumulate(term.nbytes for term in terms)
    keyed = [((term.dtype, int(end / bucket_mb / 1e6)), term) for term, end in zip(terms, ends, strict=True)]
    for _, group in groupby(keyed, key=lambda pair: pair[0]):
        bucket = [term for _, term in group]
        sizes = [term.numel() for term in bucket]
        flat = pad(torch.cat([term.reshape(-1) for term in bucket]), (0, -sum(sizes) % rank.world_size))
        sent = flat.view(torch.uint8)  # gloo exchanges bytes of all types
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        shards = received.view(flat.dtype).view(rank.world_size, -1)
        while len(shards) > 1:
            shards = shards[0::2] + shards[1::2]
        dist.all_gather(list(sent.chunk(rank.world_size)), shards[0].view(torch.uint8))
        for term, total in zip(bucket, flat[: sum(sizes)].split(sizes), strict=True):
            term.copy_(total.view(term.shape))
