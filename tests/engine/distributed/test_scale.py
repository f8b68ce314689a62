"""What a start costs with very many ranks."""

import os
import socket
from multiprocessing.connection import Client
from typing import Any

import pytest

from common.distributed import Rank
from common.failure import hub


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

    monkeypatch.setattr(hub, "from_main", offered)
    monkeypatch.setattr(hub, "Client", client)
    ranks = [hub.connect(Rank(rank, rank, 3, backend="gloo", local_world=3)) for rank in range(3)]
    try:
        for connection in clients:
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        for rank in reversed(ranks):
            rank.leave()
