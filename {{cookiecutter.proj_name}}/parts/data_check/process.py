"""A process of its own to read in: what a dataset opens or changes there is gone afterwards."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from common.data.workers import set_up_worker, signals_blocked


def in_other_process(
    loader: DataLoader[Any],
    seconds: float,
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Return what a function returns in another process.

    The function and its arguments are copied, or sent if the workers of `loader` are no copies of this process either.
    Raises `TimeoutError` after `seconds`, and `RuntimeError` if the function raised an error or the process was killed.
    """
    context: Any = loader.multiprocessing_context or multiprocessing.get_context()
    if loader.num_workers == 0:
        context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, os.getpid(), function, arguments), daemon=True)
    with signals_blocked(context):
        process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the process that reads them has ended") from None
    finally:
        process.kill()
        process.join()
        receiver.close()


def _answer(
    sender: Any,
    owner: int,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    set_up_worker(owner, 0)
    with open(os.devnull, "r+b", buffering=0) as nothing:  # what is printed would come twice
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    sender.send(function(*arguments))
