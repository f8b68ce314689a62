"""Joining the processes of a run into one group, and leaving it."""

import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from common.base.errors import UserError
from common.distributed.code import code_of
from common.distributed.collectives import gather_objects
from common.distributed.config import DistConfig
from common.distributed.launch import Launch
from common.distributed.network import interface_towards
from common.distributed.rank import Rank

_INCOMPLETE = "incomplete"
_MAX_SHOWN = 20  # differences in a message
_POLL_S = 0.05
_GRACE_S = 5.0  # for torch's own timeout to come first, and for the others to read that the run is incomplete
T = TypeVar("T")


def start(rank: Rank, config: DistConfig) -> Rank:
    """Set the device, then join the process groups; a single process joins none. Returns the rank to work with.

    Raises:
        UserError: the others, or some of them, could not be found in `dist.timeout` seconds.
    """
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    if rank.launch is None or (rank.is_alone and not rank.launch.served):
        return rank
    several_hosts = rank.launch.local_world < rank.world_size
    if several_hosts and (name := interface_towards(rank.launch.address)):
        # gloo offers its peers the address that this host's name stands for, which may be a loopback address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    timeout = timedelta(seconds=config.timeout)
    store, round_number, known_as = _meet(rank.launch, config.timeout)
    restarted = rank.restarted or round_number > 1
    rank = replace(rank, restarted=restarted, launched_as=(*rank.launched_as, *known_as))
    if rank.is_alone:  # the only process left of several
        return rank
    dist.init_process_group(
        rank.backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
        device_id=rank.device if rank.backend == "nccl" else None,
    )
    return replace(rank, control=dist.new_group(backend="gloo", timeout=timeout))


def finish(rank: Rank) -> None:
    """Leave the process group after success. Never call this on the way out of an error: it waits for the others."""
    if rank.is_alone:
        return
    dist.barrier(group=rank.control)
    dist.destroy_process_group()


def check_alike(values: Mapping[str, Any], rank: Rank) -> None:
    """Refuse processes with other settings, another PyTorch or other code than rank 0. Every process must call this.

    Raises:
        UserError: with the settings, versions or files that differ.
    """
    if rank.is_alone:
        return
    check_same(values, rank, "was started with another configuration than rank 0")
    check_same({"torch": str(torch.__version__)}, rank, "has other software than rank 0")
    code = code_of()
    if len(set(gather_objects(zlib.crc32(repr(code).encode()), rank))) > 1:
        check_same(code, rank, "runs other code than rank 0; checksums of the files")


def check_same(values: Mapping[str, Any], rank: Rank, complaint: str) -> None:
    """Refuse a process whose values are not those of rank 0, by name. Every process must call this."""
    everyone = [dict(_leaves(own)) for own in gather_objects(dict(values), rank)]
    first = everyone[0]
    for number, other in enumerate(everyone):
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if differing:
            lines = [f"  {key}: {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {number}" for key in differing]
            more = [f"  and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
            raise UserError("\n".join([f"rank {number} {complaint}:", *lines[:_MAX_SHOWN], *more]))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _meet(launch: Launch, timeout: int) -> tuple[Store, int, list[str]]:
    """Check in, and wait for all others. Returns the store, how often it was used so, and its name (on rank 0).

    A launcher that restarts dead processes keeps its store, with the entries of the dead; and torchrun's count of
    restarts differs from host to host. So each process checks in with a new random word, which rank 0 answers with
    the number of the round.
    """
    store = _open_store(launch, timeout)
    word = secrets.token_hex(8)
    store.set(f"here/{launch.rank}", f"{word} {socket.gethostname()}, process {os.getpid()}")
    if launch.rank == 0:
        round_number = store.add("rounds", 1)
        missing = _missing(store, launch, round_number, timeout)
        if missing:
            _wait_for_others_to_read(store, launch, round_number)
            raise UserError(missing)
        name = store.compare_set("name", "", secrets.token_hex(8)).decode()
        return PrefixStore(f"round {round_number}", store), round_number, [f"store {name}"]
    longer = timedelta(seconds=timeout + 10)  # so that it is rank 0 that gives up, and says who is missing
    try:
        store.wait([f"answer/{word}"], longer)
        answer = store.get(f"answer/{word}").decode()
        store.set(f"in/{answer}/{launch.rank}", "")
        store.wait([f"all in/{answer}"], longer)
        verdict = store.get(f"all in/{answer}").decode()
    except dist.DistError as error:
        raise UserError(f"rank 0 ended while the processes were gathering: {error}") from error
    if verdict == _INCOMPLETE:
        store.set(f"read/{answer}/{launch.rank}", "")
        sys.exit(2)  # as for any mistake of the user; rank 0 says which
    return PrefixStore(f"round {answer}", store), int(answer), []


def _missing(store: Store, launch: Launch, round_number: int, timeout: int) -> str:
    """Answer every rank that arrives; after `timeout` seconds, a text that names those who did not."""
    answered: set[str] = set()  # words
    waiting = list(range(1, launch.world_size))
    until = time.monotonic() + timeout
    next_warning = time.monotonic() + 30
    while waiting := [rank for rank in waiting if not store.check([f"in/{round_number}/{rank}"])]:
        for rank in waiting:
            if store.check([f"here/{rank}"]):
                word = store.get(f"here/{rank}").decode().split()[0]
                if word not in answered:  # else of a dead process, or not yet read
                    answered.add(word)
                    store.set(f"answer/{word}", str(round_number))
        names = ", ".join(map(str, waiting))
        if time.monotonic() > until:
            store.set(f"all in/{round_number}", _INCOMPLETE)
            return _missing_text(store, launch, waiting, timeout)
        if time.monotonic() > next_warning:
            next_warning = time.monotonic() + 60
            logger.warning("still waiting for rank {} of {}", names, launch.world_size)
        time.sleep(_POLL_S)
    store.set(f"all in/{round_number}", "")
    return ""


def _wait_for_others_to_read(store: Store, launch: Launch, round_number: int) -> None:
    """Wait until the others have read it: where rank 0 serves the store, the store ends with it."""
    arrived = [rank for rank in range(1, launch.world_size) if store.check([f"in/{round_number}/{rank}"])]
    if arrived:
        with suppress(dist.DistError):
            store.wait([f"read/{round_number}/{rank}" for rank in arrived], timedelta(seconds=_GRACE_S))


def _missing_text(store: Store, launch: Launch, missing: list[int], timeout: int) -> str:
    arrived = [rank for rank in range(launch.world_size) if rank not in missing]
    there = "\n".join(f"  rank {rank}: {store.get(f'here/{rank}').decode().partition(' ')[2]}" for rank in arrived[:16])
    names = ", ".join(map(str, missing))
    return (
        f"rank {names} of {launch.world_size} did not arrive at {launch.address}:{launch.port} in {timeout} s "
        f"(dist.timeout); did it start, and does it see this host? Arrived:\n{there}"
    )


def _open_store(launch: Launch, timeout: int) -> Store:
    where = f"{launch.address}:{launch.port}"
    serving = launch.rank == 0 and not launch.served
    try:
        socket.getaddrinfo(launch.address, launch.port)
    except OSError as error:
        raise UserError(
            f"the host {launch.address!r}, where the processes meet, is not known here ({error}); "
            "set MASTER_ADDR to a name or address that every node can reach"
        ) from error

    def open_store() -> Store:
        place = (launch.address, launch.port, launch.world_size)
        return TCPStore(*place, is_master=serving, timeout=timedelta(seconds=timeout), wait_for_workers=False)

    try:
        # torch waits forever for another program that listens there and does not answer.
        return _within(timeout + _GRACE_S, open_store)
    except futures.TimeoutError as error:
        raise UserError(f"port {where} is taken by another program; set MASTER_PORT to another") from error
    except dist.DistError as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text or "address already in use" in text:
            raise UserError(
                f"port {launch.port} of {socket.gethostname()} is taken by another program; set MASTER_PORT to another"
            ) from error
        raise UserError(
            f"rank {launch.rank} could not reach rank 0 at {where} in {timeout} s (dist.timeout): has it started, and "
            f"is there a firewall in between? ({text})"
        ) from error


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` gives. Raises `futures.TimeoutError` when that takes longer; the call is then abandoned."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(seconds)
