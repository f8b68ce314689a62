"""Joining the processes of a run into one group, and leaving it."""

import secrets
import socket
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed import PrefixStore, Store, TCPStore

from common.base.errors import UserError
from common.base.files import PROJECT
from common.base.text import flat
from common.distributed.collectives import barrier, gather_objects
from common.distributed.config import DistConfig
from common.distributed.launch import ALONE, Rank

_POLL_S = 0.05
_POLL_EACH_S = 0.0005  # for each rank, so that many together ask the store no more than 6,000 times a second
_REPORT_AFTER_S = 10.0  # a rank that has not arrived by then is named
_GRACE_S = 5.0  # rank 0 must give up first, since it knows which ranks are missing


def start(rank: Rank, config: DistConfig) -> Rank:
    """Join the process groups; a single process joins none. Returns the rank to use.

    Raises:
        UserError: some processes could not be reached within `dist.timeout` seconds.
    """
    if rank.is_single_process and not rank.launcher_hosts_store:
        return rank
    timeout = timedelta(seconds=config.timeout)
    store = _open_store(rank, config.timeout)
    # Every start by the same torchrun reads the name that the first one wrote to its store.
    name = store.compare_set("name", "", secrets.token_hex(8)).decode()
    if rank.is_main:
        round_number = _open_round(store, rank, config.timeout)
    else:
        round_number = _join_round(store, rank, config.timeout)
    launched_as = (*rank.launched_as, f"store {name}")
    rank = replace(rank, restarted=rank.restarted or round_number > 1, launched_as=launched_as)
    if rank.is_single_process:  # a single process under torchrun
        return rank
    device_id = None
    if rank.backend == "nccl":
        device_id = rank.device
    dist.init_process_group(
        rank.backend,
        store=PrefixStore(f"round {round_number}", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
        device_id=device_id,
    )
    return replace(rank, control=dist.new_group(backend="gloo", timeout=timeout))


def finish(rank: Rank) -> None:
    """Leave the process group after success. Never call this after an error: it waits for the others."""
    if not rank.is_single_process:
        barrier(rank)
        dist.destroy_process_group()


def check_alike(values: Mapping[str, Any], rank: Rank) -> None:
    """Reject processes whose settings, PyTorch or code differ from rank 0's. Every process must call this.

    Raises:
        UserError: with the settings, versions or files that differ.
    """
    if rank.is_single_process:
        return
    settings = {**values, "torch": str(torch.__version__)}
    check_same(settings, rank, "was started with a different configuration than rank 0")
    check_same(code_of(), rank, "runs different code than rank 0; checksums of the files")


def code_of(project: Path = PROJECT) -> dict[str, str]:
    """Return a checksum of each of the project's Python files, by path: those next to train.py, and in packages there.

    Tests are left out. Takes about 0.1 ms for each file.
    """
    files = list(project.glob("*.py"))
    for package in project.glob("*/__init__.py"):
        if package.parent.name != "tests":
            files += package.parent.rglob("*.py")
    checksums = {}
    for file in sorted(files):
        with suppress(OSError):  # such as an editor's dangling link
            checksums[file.relative_to(project).as_posix()] = f"{zlib.crc32(file.read_bytes()):08x}"
    return checksums


def check_same(
    values: Mapping[str, Any],
    rank: Rank,
    complaint: str,
) -> None:
    """Reject a process whose values differ from rank 0's; the error lists them. Every process must call this."""
    first, *others = gather_objects(flat(values), rank)
    for number, other in enumerate(others, 1):
        lines = []
        for key in {**first, **other}:
            if repr(first.get(key)) != repr(other.get(key)):  # NaN differs from itself
                lines.append(f"  {key}: {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {number}")
        if lines:
            raise UserError("\n".join([f"rank {number} {complaint}:", *lines]))


def _open_store(rank: Rank, timeout: int) -> Store:
    """Connect to the store of rank 0 or of the launcher; rank 0 opens its own."""
    warning = threading.Timer(_REPORT_AFTER_S, _warn_of_missing, ("0", rank, timeout))
    warning.daemon = True
    serves = rank.is_main and not rank.launcher_hosts_store
    action = "listen"
    if not serves:
        action = "reach rank 0"
        warning.start()
    try:
        socket.getaddrinfo(rank.address, rank.port)  # torch would retry an unknown host name until the timeout
        limit = timedelta(seconds=timeout)
        return TCPStore(rank.address, rank.port, is_master=serves, timeout=limit, wait_for_workers=False)
    except (OSError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {rank.rank} could not {action} at {rank.address}:{rank.port} in {timeout} s (MASTER_ADDR, "
            f"MASTER_PORT, dist.timeout): {reason}; {ALONE}"
        ) from error
    finally:
        warning.cancel()


def _warn_of_missing(missing: str, rank: Rank, timeout: int) -> None:
    """Log which ranks this process waits for: a user who meant to start one need not wait for the timeout."""
    logger.warning(
        f"rank {rank.rank} is waiting at {rank.address}:{rank.port} for rank {missing} of {rank.world_size}, for up to "
        f"{timeout} s (dist.timeout); {ALONE}"
    )


def _open_round(store: Store, main: Rank, timeout: int) -> int:
    """Rank 0's part: wait until all others have come. Returns the round's number: 1 for the first at this store.

    A torchrun that restarts dead processes keeps its store, with what they wrote, and its count of restarts differs
    from host to host. So each round has a new number, and a round that is never completed is replaced by the next.
    """
    began = time.monotonic()
    number = store.add("rounds", 1)
    keys = [f"here/{number}/{rank}" for rank in range(main.world_size)]
    store.set(keys[0], "")
    store.set("open", str(number))
    report_at = began + _REPORT_AFTER_S
    while not store.check(keys):
        time.sleep(_POLL_S)
        absent = []
        for rank, key in enumerate(keys):
            if not store.check([key]):
                absent.append(str(rank))
        missing = ", ".join(absent)
        now = time.monotonic()
        if now > began + timeout:
            raise UserError(
                f"rank {missing} of {main.world_size} did not arrive at {main.address}:{main.port} in {timeout} s "
                f"(dist.timeout); is it running, and can it reach this host? {ALONE}"
            )
        if now > report_at:
            report_at = float("inf")
            _warn_of_missing(missing, main, timeout)
    store.set("open", "")
    store.set(f"complete/{number}", "")
    return number


def _join_round(store: Store, rank: Rank, timeout: int) -> int:
    """Do the other ranks' part of `_open_round`: check in, and wait for all. Returns the round's number."""
    until = time.monotonic() + timeout + _GRACE_S
    number = ""
    try:
        while not store.check([f"complete/{number}"]):
            if time.monotonic() > until:
                raise UserError(f"rank 0 did not find all {rank.world_size} processes, see its message")
            number = store.get("open").decode() or number
            store.set(f"here/{number}/{rank.rank}", "")
            time.sleep(_POLL_S + _POLL_EACH_S * rank.world_size)
    except dist.DistError as error:
        raise UserError(f"rank 0 ended while the processes were gathering: {error}") from error
    return int(number)
