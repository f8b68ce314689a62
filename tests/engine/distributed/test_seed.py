"""Seeds: the numbers of PyTorch's own function, without a question to a driver."""

import random

import numpy as np
import pytest
import torch

from common.distributed.seed import set_seed


@pytest.mark.parametrize("seed", [0, 3, 2**40 + 5, 2**64 - 1])
def test_the_numbers_are_those_of_torch(seed: int) -> None:
    set_seed(seed)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_devices_are_seeded_where_pytorch_knows_any(
    monkeypatch: pytest.MonkeyPatch, accelerator: torch.device | None
) -> None:
    """Also before one is used; whether there is one is not asked, since a forked worker could then use none."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: pytest.fail("asks the driver"))
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    set_seed(7)
    assert seeds == ([7] if accelerator else [])
