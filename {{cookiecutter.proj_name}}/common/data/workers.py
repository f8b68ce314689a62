"""Loader processes: signals do not stop them, and they do not outlive the trainer."""

import atexit
import errno
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import queues, resource_tracker
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.base.process import STOP_SIGNALS, die_with_parent
from common.data.held import open_handle

_DEATH_WITHIN_S = 5.0
_SHARED = (
    "{} is open, and every worker would read from it at the same position, and so get other samples than it asked for. "
    "Open it on first use, in __getitem__ (self.file = None in the constructor), or use --num_workers 0"
)
_POLL_S = 1.0  # how often a process that waits for a batch looks for a signal
_NOT_SENT = 91  # exit code of a worker that cannot send a batch: else the trainer would wait for it for ever
_IS_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOSPC)
_IS_UNSENT = re.compile("Too many open files|items of ancdata")  # what the receiving process says
_UNSENT = (
    "a worker process cannot send a batch ({}). If too many files are open (each tensor needs one until its batch is "
    "used): return fewer, larger tensors in a sample, raise the limit (ulimit -n 65536; docker run --ulimit "
    "nofile=65536), or use fewer --num_workers"
)
_stop_signal: Callable[[], int] = int  # of the run; int() is 0, for none


class WaitInterrupted(UserError):
    """A stop signal arrived while a batch was waited for, and the batch has not come since."""


def stop_waiting_when(stop_signal: Callable[[], int]) -> None:
    """Wait for no batch once `stop_signal` returns the signal that stops the run; until then it returns 0."""
    global _stop_signal
    _stop_signal = stop_signal


@contextmanager
def until_signal(*, is_alone: bool) -> Iterator[None]:
    """End the block if a signal stops the run while a batch is waited for; not if other processes wait for this one."""
    try:
        yield
    except WaitInterrupted:
        if not is_alone:
            raise


def start_reading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start reading `loader`. Its workers, and Python's helper processes, start with the trainer's signals blocked.

    Raises:
        UserError: the workers would share a file that the dataset has open.
    """
    if loader.num_workers == 0:
        return iter(loader)
    context = loader.multiprocessing_context or multiprocessing.get_context()
    held = open_handle(loader.dataset)
    if held and context.get_start_method() == "fork":
        raise UserError(_SHARED.format(held))
    try:
        with signals_blocked(context):
            return iter(loader)
    except TypeError as error:  # an open file cannot be sent to a worker that is no copy of this process
        if held:
            raise UserError(_SHARED.format(held)) from error
        raise


@contextmanager
def signals_blocked(context: Any) -> Iterator[None]:
    """Block the trainer's signals while a process starts: one that arrives reaches this process afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # starts a process, and then unblocks SIGTERM and SIGINT
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Loaded:
    """A batch as a loader returns it. Pinning skips tensors that are on a GPU."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def pin_memory(self) -> "Loaded":
        return Loaded(map_tensors(self.batch, _pinned, "pin_memory"))


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return tensor
    return tensor.pin_memory()


def read(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield the batches of `loader`. Without workers or pinning, without its iterator: this saves 15 us for each."""
    iterator: Iterator[Any] | None = None
    try:
        if loader.num_workers == 0 and loader.batch_sampler is not None and not loader.pin_memory:
            yield from map(loader.dataset.__getitems__, loader.batch_sampler)  # type: ignore[attr-defined]
            return
        iterator = start_reading(loader)
        if isinstance(iterator, _MultiProcessingDataLoaderIter) and not loader.timeout:
            _look_for_signals(iterator)
        for loaded in iterator:
            yield loaded.batch
    except WaitInterrupted:
        raise
    except UserError as error:
        # torch prefixes an error from a worker with its whole traceback.
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
    except Exception as error:
        text = str(error)
        code = 0
        if not text.startswith("Caught "):  # not an error of its own code
            code = _code_of_ended(iterator)
        if code == _NOT_SENT:
            text = "its error is above"
        elif code < 0:
            raise RuntimeError(f"a DataLoader worker was killed by signal {-code}") from error
        elif not _IS_UNSENT.search(text):
            raise
        last = text.strip().rpartition("\n")[2]
        raise UserError(_UNSENT.format(last)) from None


def _look_for_signals(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Let `iterator` look for the signal that stops the run while it waits for a batch."""
    get = type(iterator)._try_get_data

    def get_or_stop(timeout: float = _POLL_S) -> Any:
        found = get(iterator, timeout)
        if not found[0]:
            number = _stop_signal()
            if number:
                name = signal.Signals(number).name
                raise WaitInterrupted(
                    f"{name} ends the run, but no batch has come since: training since latest.pt is lost"
                )
        return found

    vars(iterator)["_try_get_data"] = get_or_stop


def _code_of_ended(iterator: Iterator[Any] | None) -> int:
    """Return the exit code of a loader's process that has failed, negative for a signal; 0 if all live.

    The kernel closes the pipes of a killed process first, and reports its death a little later; torch looks only once,
    and would raise an error of the pipe (ConnectionResetError, EOFError, ...). On a busy machine that is the usual one.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return 0
    until = time.monotonic() + _DEATH_WITHIN_S
    while time.monotonic() < until:
        for worker in iterator._workers:
            if worker.exitcode:
                return int(worker.exitcode)
        with suppress(RuntimeError):  # torch raises it when it hears of a worker's end
            time.sleep(0.02)
    return 0


def end_workers(loader: DataLoader[Any]) -> None:
    """Stop the workers that `loader` keeps for its next pass, if any.

    The garbage collector would take 5 s for each: it closes their queues before it stops them.
    """
    iterator = loader._iterator
    loader._iterator = None
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def set_up_worker(owner: int, _: int) -> None:
    """Set up a worker process; `owner` is the id of the process that reads from it."""
    # Workers ignore signals; the trainer decides when to stop.
    for number in STOP_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    # A handler, because an ignored or blocked signal would stay so in programs that a dataset starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    setattr(queues.Queue, "_on_queue_feeder_error", staticmethod(_end_unsent))  # noqa: B010 - not for type checkers
    sys.excepthook = lambda kind, error, trace: _end_unsent(error)  # of the thread that sends open files
    torch.set_num_threads(1)
    if "cv2" in sys.modules:  # OpenCV would start a thread per core in each worker
        sys.modules["cv2"].setNumThreads(0)
    if os.getppid() == owner:  # not with forkserver, where the parent is the server
        die_with_parent()


def _end_unsent(error: BaseException, _: object = None) -> None:
    """End a worker that cannot send a batch. Python would print why, perhaps without end, and no batch would come."""
    is_gone = isinstance(error, (EOFError, multiprocessing.AuthenticationError))
    if is_gone or (isinstance(error, OSError) and error.errno not in _IS_FULL):
        return  # the connection is closed: the batch is no longer wanted, and the worker is about to end
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(_NOT_SENT)


@atexit.register  # runs before multiprocessing's own handler, which would send SIGTERM and wait
def _kill_remaining_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report each as an error
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
