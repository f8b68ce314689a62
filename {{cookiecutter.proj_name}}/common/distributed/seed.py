"""Seeds and random states of the loop. Order and augmentation are functions of keys instead, see `common.data`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")


def mix(*numbers: int) -> int:
    """Hash integers into one of 64 bits (splitmix64, Steele, Lea and Flood 2014): similar keys give unrelated seeds."""
    state = 0
    for number in numbers:
        state = (state ^ number) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_all(seed: int) -> None:
    """Seed the three global CPU generators. Not `torch.manual_seed`, which would touch CUDA in forked workers."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and PyTorch (all devices) with one 64-bit number."""
    seed_all(seed)
    if torch.accelerator.current_accelerator():  # PyTorch for the CPU would only note the call, in 100 us and more
        torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """This process' random states as plain numbers and tensors, safe to load from a checkpoint."""
    name, keys, *others = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    state = {
        "python": random.getstate(),
        "numpy": [name, words, *others],
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


@contextmanager
def random_state_unchanged(device: torch.device = _CPU) -> Iterator[None]:
    """Restore this process' random states on exit, even after an error. Takes 80 microseconds on the CPU."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, words, *others = state["numpy"]
    keys = words.numpy().astype(np.uint32)
    np.random.set_state((name, keys, *others))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
