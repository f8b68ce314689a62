"""What a start costs with very many ranks."""

import os
import socket
import time
from multiprocessing.connection import Client
from typing import Any

import pytest

from common.distributed import Rank, group
from common.failure import monitor


def test_a_rank_does_not_wait_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, rank 0 needs 40 ms to take in a rank, one after the other: 57 s for 1,000."""
    offers: list[Any] = []
    clients: list[Any] = []

    def offered(offer: Any, rank: Rank) -> Any:
        offers.append(offer)
        return offers[0]

    def client(*given: Any, **options: Any) -> Any:
        clients.append(Client(*given, **options))
        return clients[-1]

    monkeypatch.setattr(monitor, "from_main", offered)
    monkeypatch.setattr(monitor, "Client", client)
    ranks = [monitor.connect(Rank(rank, rank, 3, backend="gloo", local_world=3)) for rank in range(3)]
    try:
        for connection in clients:
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        for rank in reversed(ranks):
            rank.leave()


@pytest.mark.parametrize(("world", "seconds"), [(8, 0.05), (1000, 0.5)])
def test_many_ranks_ask_the_store_less_often(monkeypatch: pytest.MonkeyPatch, world: int, seconds: float) -> None:
    """Each asks it three times in a round of waiting; it answers 90,000 times a second at most."""
    waits: list[float] = []

    class Store:
        """Ends the round at the third question."""

        def check(self, keys: list[str]) -> bool:
            return len(waits) == 2

        def get(self, key: str) -> bytes:
            return b"complete" if key.startswith("end") else b"1"

        def set(self, key: str, value: str) -> None:
            pass

    monkeypatch.setattr(time, "sleep", waits.append)
    store: Any = Store()
    assert group._join_round(store, Rank(1, 1, world), 60) == 1
    assert waits == [seconds, seconds]
