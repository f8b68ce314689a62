"""Several processes of one program, as a launcher would start them, without the seconds that a launcher takes."""

import multiprocessing
import os
import socket
import traceback
from pathlib import Path
from typing import Any

import torch

import evaluate
import train
from common.failsafe import reported
from tests.conftest import Runs
from tests.parts import Killed

PROGRAMS = {"train": train.main, "evaluate": evaluate.main}


def _rank(rank: int, world: int, port: int, program: str, argv: list[str], at: int, setup: Any, log: str) -> None:
    """One process of a run, as torchrun would start it."""
    os.environ["MORTAL_AT"] = str(at)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    # Else the loader's workers would be started the way this process was, by a server that first imports torch.
    multiprocessing.set_start_method("fork", force=True)
    if setup is not None:
        setup()
    code = 1
    try:
        with reported():
            code = PROGRAMS[program](argv)
    except Killed:
        code = 9
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:  # noqa: BLE001 - it must reach the test
        Path(log).write_text(traceback.format_exc())
    os._exit(code)


def start_ranks(
    runs: Runs, world: int, argv: list[str], *, program: str = "train", at: int = 0, setup: Any = None
) -> tuple[list[int | None], str]:
    """Run `argv` in `world` processes, forked from a server that has torch imported; exit codes, and what broke.

    `at`: the training call at which `tests.parts.Mortal` ends each of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [str(runs.root / f"rank{rank}.txt") for rank in range(world)]
    children = [
        context.Process(target=_rank, args=(rank, world, port, program, argv, at, setup, logs[rank]))
        for rank in range(world)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
        child.kill()
    told = "\n".join(Path(log).read_text() for log in logs if Path(log).exists())
    return [child.exitcode for child in children], told


def several(runs: Runs, world: int, argv: list[str], *, program: str = "train", at: int = 0, setup: Any = None) -> None:
    """The same, and all must end well; or be killed, with `at`."""
    codes, told = start_ranks(runs, world, argv, program=program, at=at, setup=setup)
    assert codes == [9 if at else 0] * world, told
