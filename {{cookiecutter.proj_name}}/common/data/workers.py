"""The loader's processes: what reaches them, and what does not."""

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from common.failure.failsafe import die_with_parent

# Whoever stops a run mostly signals all of its processes at once: a terminal, Slurm, torchrun, `kill -- -GROUP`.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_FOR_THE_LOOP = {getattr(signal, name) for name in _NAMES if hasattr(signal, name)}


def opened(loader: DataLoader[Any]) -> Iterator[Any]:
    """What `loader` reads. Its workers start with those signals held back, and so do Python's own servers of processes.

    What arrives meanwhile reaches this process afterwards.
    """
    if loader.num_workers == 0 or not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_LOOP)
    try:
        if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
            resource_tracker.ensure_running()  # a process; then it lets SIGTERM and SIGINT in, whatever was before
            signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_LOOP)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(loader: DataLoader[Any]) -> None:
    """End those that `loader` keeps for its next pass, if any.

    Left to the garbage collection, they would be waited for, 5 s each: it closes their queues before they are told.
    """
    iterator, loader._iterator = loader._iterator, None
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


class WorkerStart:
    """What a loader's process does first. Made in the process that it is to serve."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __call__(self, _: int) -> None:
        # The loop decides what a signal means; workers go on serving, or it would fail for want of data.
        for number in _FOR_THE_LOOP - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)
        # By a handler: what is ignored or held back stays so in programs that a data set starts, and may want to end.
        signal.signal(signal.SIGTERM, lambda *_: None)
        if hasattr(signal, "pthread_sigmask"):
            signal.siginterrupt(signal.SIGTERM, False)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        torch.set_num_threads(1)
        if "cv2" in sys.modules:  # OpenCV would start a thread per core in each worker
            sys.modules["cv2"].setNumThreads(0)
        if os.getppid() == self.owner:  # and not Python's server of processes, which lives shorter or longer
            die_with_parent()


@atexit.register  # so it runs before what multiprocessing has registered, which would send SIGTERM and wait
def _end_those_that_do_not_listen() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
