"""Wrappers for a whole program: join the other processes, leave with them, report errors, set the exit code."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from loguru import logger

from common import distributed
from common.base.errors import UserError
from common.base.process import die_with_parent, raise_file_limit
from common.config import Resolved
from common.distributed import DistConfig, Rank
from common.distributed.devices import set_up_process
from common.failure.hub import FailureMonitor, connect, end
from common.failure.report import describe
from common.failure.signals import catch_early_signals

_joined = False  # whether this process was one of several


class TrainingError(UserError):
    """Training cannot continue, for a reason that a traceback would only obscure (a NaN loss, ...)."""


@contextmanager
def distributed_run(
    rank: Rank,
    config: DistConfig,
    resolved: Resolved[Any],
) -> Iterator[Rank]:
    """Set this process up, join the others for the block, then leave with them; if one fails, all end.

    The reason of the first failure is shown.

    Args:
        resolved: the whole config, whose values must be the same on all processes; its warnings are logged.

    Raises:
        UserError: the processes did not find each other, or were started with different settings.
    """
    global _joined
    set_up_process(config, rank)
    catch_early_signals()
    if rank.parent is not None:
        die_with_parent(rank.parent)
    rank = distributed.start(rank, config)
    rank = replace(rank, failure_monitor=connect(rank))
    _joined = not rank.is_single_process
    try:
        distributed.check_alike(resolved.values, rank)
        if rank.is_main:
            for text in resolved.warnings:
                logger.warning("{}", text)
        yield rank
        distributed.finish(rank)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not rank.is_single_process:
            rank.failure_monitor.fail(describe(error, rank))  # ends this process
        raise
    rank.failure_monitor.leave()


@contextmanager
def report_errors() -> Iterator[None]:
    """Print the reason for an error, and exit with a nonzero code. From here on, Ctrl-C raises KeyboardInterrupt."""
    raise_file_limit()
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - any error
        failure = describe(error, Rank())
        FailureMonitor().fail(failure)
        sys.exit(failure.code)


def exit_process(code: int) -> NoReturn:
    """End the program. Call it last, when everything is written."""
    if _joined:
        # gloo's threads may still hold Python objects, and abort the process when they free them while Python shuts
        # down (one run in four). Collecting garbage first makes it rare, but it still occurred on a busy machine.
        end(code)
    sys.exit(code)
