"""Several ranks of a program, forked from a server that has torch imported: a second instead of four."""

import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.base.process import die_with_parent
from common.failure.hub import end
from common.failure.program import report_errors
import evaluate
import train
from tests.conftest import Runs
from tests.small import Killed

SOON = 10.0  # seconds that everybody else may take to end after one has failed
_PATIENCE = 100.0  # seconds for the ranks to end, well or not; what takes longer hangs
_PROGRAMS = {"train": train.main, "evaluate": evaluate.main}


@dataclass(frozen=True)
class Ended:
    """How ranks ended: exit codes, what each wrote to the terminal, and after how many seconds, in rank order."""

    codes: list[int | None]
    texts: list[str]
    seconds: list[float]


def start_ranks(
    folder: Path,
    world: int,
    argv: list[str],
    *,
    program: str = "train",
    environment: Mapping[str, str] | None = None,
    only: list[int] | None = None,
    more: Mapping[int, list[str]] | None = None,
    setup: Any = None,
) -> Ended:
    """Run a program in `world` processes with torchrun's variables, in `folder`; `only`: the others never come.

    A rank that does not end by itself fails the test: its code would be that of a kill, and look like a good answer.

    Args:
        more: further words for some of the ranks.
        setup: called in each of them first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "evaluate", "tests.ranks", "torch._dynamo"])  # imported by each optimizer
    shared = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    if world == 1:  # as torchrun starts it: variables of a single process that are set by hand say nothing
        shared["TORCHELASTIC_RUN_ID"] = "tests"
    shared |= {"MASTER_PORT": str(free_port()), **(environment or {})}
    ranks = range(world) if only is None else only
    outputs = [folder / f"terminal{rank}.txt" for rank in ranks]
    children = [
        context.Process(
            target=_run,
            args=(
                setup,
                program,
                [*argv, *(more or {}).get(rank, [])],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                str(output),
            ),
        )
        for rank, output in zip(ranks, outputs, strict=True)
    ]
    start = time.monotonic()
    seconds: dict[int, float] = {}
    try:
        for child in children:
            child.start()
        while len(seconds) < len(children) and time.monotonic() < start + _PATIENCE:
            for number, child in enumerate(children):
                if number not in seconds and child.exitcode is not None:
                    seconds[number] = time.monotonic() - start
            time.sleep(0.02)
    finally:
        for child in children:
            if child.pid is not None:
                child.kill()
                child.join()
    texts = [output.read_text() for output in outputs]
    hung = [rank for number, rank in enumerate(ranks) if number not in seconds]
    assert not hung, f"killed after {_PATIENCE:.0f} s: rank {hung}\n" + "\n".join(texts)
    return Ended([child.exitcode for child in children], texts, [seconds[number] for number in range(len(children))])


def failed(ended: Ended) -> Ended:
    """Check what all failures have in common: no rank ends well, and when the first one ends, the others soon do."""
    assert all(ended.codes), f"some rank ended well: {ended.codes}"
    assert max(ended.seconds) - min(ended.seconds) < SOON
    return ended


def free_port() -> int:
    """Return a port without a listener, below those that the kernel hands out: it stays free until it is used."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def several(runs: Runs, world: int, argv: list[str], *, program: str = "train", at: int = 0, setup: Any = None) -> None:
    """Run on `world` ranks, to a good end; or to the training call `at`, at which `tests.small.Mortal` ends each."""
    ended = start_ranks(runs.root, world, argv, program=program, environment={"MORTAL_AT": str(at)}, setup=setup)
    # One that is slow to come to its end may be ended by that of the others.
    assert set(ended.codes) <= ({9, 1} if at else {0}), "\n".join(ended.texts)


def refused(runs: Runs, world: int, argv: list[str], setup: Any = None) -> str:
    """Run on `world` ranks, which must end soon with a mistake of the user; what they wrote to the terminal."""
    ended = failed(start_ranks(runs.root, world, argv, setup=setup))
    # 2: a mistake that this rank has found; 1: it was ended, since another one was quicker to tell.
    assert 2 in ended.codes and set(ended.codes) <= {1, 2}, "\n".join(ended.texts)
    return "\n".join(ended.texts)


def _run(setup: Any, program: str, argv: list[str], environment: dict[str, str], output: str) -> None:
    die_with_parent()  # the server ends with the tests, however they end
    # A test of loader workers may have started the server, with the signals blocked that workers ignore.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()  # what was there when the server was started
    os.environ.update(environment)
    torch.set_num_threads(1)
    # Else the loader's workers would be started the way this process was, by a server that first imports torch.
    multiprocessing.set_start_method("fork", force=True)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if setup is not None:
        setup()
    code: Any = 1
    try:
        with report_errors():
            code = _PROGRAMS[program](argv)
    except Killed:
        code = 9
    except SystemExit as error:
        code = error.code
    end(code)
