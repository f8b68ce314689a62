"""A first step of DDP before training, with its result discarded. It also finds parameters without a gradient."""

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.base.errors import UserError
from common.config.names import join_names
from common.distributed import Rank, gather_objects
from common.distributed.buffers import buffers_unchanged
from common.distributed.seed import random_state_unchanged
from common.model.freeze import without_gradient


def warm_up_ddp(
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    loss: Callable[[], Tensor],
    rank: Rank,
) -> None:
    """Run one backward pass and discard its result: weights, buffers and random generators stay as they were.

    DDP reduces gradients in one order in its first backward and in another from the second on. A resumed run would
    use the first order again and, with three ranks or more, add up in another order than the uninterrupted run.

    Raises:
        UserError: a trained parameter gets no gradient on some rank. Raised on all ranks; DDP would only wait.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    model.train()
    with random_state_unchanged(rank.device), buffers_unchanged(model.module):
        if not (model.find_unused_parameters or model.static_graph):
            with model.no_sync():  # otherwise DDP would wait forever for a missing gradient
                loss().backward()
            _refuse_unused(model.module, trained, rank)
            model.zero_grad(set_to_none=True)
        loss().backward()
    model.zero_grad(set_to_none=True)


def _refuse_unused(model: nn.Module, trained: Sequence[nn.Parameter], rank: Rank) -> None:
    unused = gather_objects(without_gradient(model, trained), rank)
    names = list(dict.fromkeys(chain.from_iterable(unused)))
    where = ""
    if any(names_of_rank != names for names_of_rank in unused):
        where = ", on some of the ranks"
    if names:
        raise UserError(
            f"{len(names)} parameters get no gradient in a first step{where}, and DDP would wait for it: "
            f"{join_names(names)}.\n  Use them in the model's forward and in the loss, or freeze (prepare.freeze); "
            "if which are used changes from batch to batch: --dist.find_unused_parameters true"
        )
