"""A pytest plugin, `-p computed_once`: caches bytecode, and results that every training would compute again.

A test process trains hundreds of times, and a quarter of that time was the data check, which forks twice per run.
"""

import importlib
import inspect
import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warm import compile_once, remember_packages

# Of tests and project: compiling them, and rewriting `assert`, was half of what each process does before its tests.
compile_once(str(Path(sys.prefix, "bytecode")))

# Tests of what the data check reads, or how: they are not served from the cache.
_UNCACHED = re.compile(r"data_check|data/test_|test_guarantee|test_early_errors")
# Datasets whose samples depend on their attributes alone.
_DIGITS = {"tests.samples.Digits", "tests.small.NoisyDigits", "custom.datasets.digits_dataset.DigitsDataset"}
_is_uncached = [True]
os.environ.pop("PYTHONPATH", None)  # programs that tests start need not find this file


def innermost(dataset: Any) -> Any:
    """Return the dataset inside all views of it."""
    while "whole" in vars(dataset):
        dataset = dataset.whole
    return dataset


class _Values(pickle.Pickler):
    """Pickles a tensor by its values: torch would write its address too."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return bytes, (obj.numpy().tobytes(),)
        return NotImplemented


def state_of(value: Any) -> bytes:
    """Return bytes that are the same for equal values."""
    stream = io.BytesIO()
    _Values(stream).dump(value)
    return stream.getvalue()


def remember_readings(reading: Any) -> None:
    """Cache what the data check's processes read of the digits."""
    read_there: Callable[..., Any] = reading.in_other_process
    known: dict[bytes, tuple[Any, list[Any]]] = {}

    def in_other_process(loader: Any, seconds: float, function: Any, batches: Any, is_second: bool) -> Any:
        kinds = {type(innermost(part.dataset)) for part in batches.values()}
        if _is_uncached[0] or not {f"{kind.__module__}.{kind.__name__}" for kind in kinds} <= _DIGITS:
            return read_there(loader, seconds, function, batches, is_second)
        # A test may replace a method. Kept, since the id of a deleted function is used again.
        methods = [method for kind in kinds for _, method in inspect.getmembers(kind, inspect.isfunction)]
        state = state_of((batches, is_second, [id(method) for method in methods]))
        if state not in known:
            known[state] = (read_there(loader, seconds, function, batches, is_second), methods)
        return known[state][0]

    reading.in_other_process = in_other_process


def pytest_collection_finish() -> None:
    """Install the caches, once the tests have imported the project."""
    remember_packages()
    if "common.trainer" in sys.modules:
        remember_readings(importlib.import_module("parts.data_check.reading"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note for the time of a test whether it may use the cache."""
    _is_uncached[0] = bool(_UNCACHED.search(item.nodeid))
    yield
