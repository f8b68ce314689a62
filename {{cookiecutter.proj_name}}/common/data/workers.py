"""Loader processes: signals do not stop them, and they do not outlive the trainer."""

import atexit
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from common.base.errors import UserError
from common.base.process import die_with_parent

# A terminal, Slurm, torchrun and `kill -- -GROUP` signal all processes of a run at once.
_TRAINER_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
# Errors of a worker's own code, and what torch says when it notices that a worker is dead.
_IS_EXPLAINED = re.compile("Caught .* in DataLoader worker process|DataLoader (worker|timed out)")
_DEATH_WITHIN_S = 5.0


def start_reading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start reading `loader`. Its workers, and Python's helper processes, start with the trainer's signals blocked.

    A signal that arrives meanwhile reaches this process afterwards.
    """
    if loader.num_workers == 0:
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINER_SIGNALS)
    try:
        if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
            resource_tracker.ensure_running()  # starts a process, and then unblocks SIGTERM and SIGINT
            signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINER_SIGNALS)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def read(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield the batches of `loader`. In this process they are read without its iterator, which takes 15 us for each."""
    iterator: Iterator[Any] | None = None
    try:
        if loader.num_workers == 0 and loader.batch_sampler is not None and not loader.pin_memory:
            yield from map(loader.dataset.__getitems__, loader.batch_sampler)  # type: ignore[attr-defined]
            return
        iterator = start_reading(loader)
        for loaded in iterator:
            yield loaded.batch
    except UserError as error:
        # torch prefixes an error from a worker with its whole traceback.
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
    except Exception as error:
        if not _IS_EXPLAINED.match(str(error)) and (killed := _killed_worker(iterator)):
            why = f"DataLoader worker (pid {killed.pid}) was killed by signal {-killed.exitcode}"
            raise RuntimeError(why) from error
        raise


def _killed_worker(iterator: Iterator[Any] | None) -> Any:
    """Return the process of a loader that a signal has killed; None if all live.

    The kernel closes the pipes of a killed process first, and reports its death a little later; torch looks only once,
    and would raise an error of the pipe (ConnectionResetError, EOFError, ...). On a busy machine that is the usual one.
    """
    workers = iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else ()
    until = time.monotonic() + _DEATH_WITHIN_S
    while workers and time.monotonic() < until:
        if killed := next((worker for worker in workers if (worker.exitcode or 0) < 0), None):
            return killed
        time.sleep(0.02)
    return None


def end_workers(loader: DataLoader[Any]) -> None:
    """Stop the workers that `loader` keeps for its next pass, if any.

    The garbage collector would take 5 s for each: it closes their queues before it stops them.
    """
    iterator, loader._iterator = loader._iterator, None
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def set_up_worker(owner: int, _: int) -> None:
    """Set up a worker process; `owner` is the id of the process that reads from it."""
    # Workers ignore signals; the trainer decides when to stop.
    for number in _TRAINER_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    # A handler, because an ignored or blocked signal would stay so in programs that a dataset starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    torch.set_num_threads(1)
    if "cv2" in sys.modules:  # OpenCV would start a thread per core in each worker
        sys.modules["cv2"].setNumThreads(0)
    if os.getppid() == owner:  # not with forkserver, where the parent is the server
        die_with_parent()


@atexit.register  # runs before multiprocessing's own handler, which would send SIGTERM and wait
def _kill_remaining_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report each as an error
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
