"""A pytest plugin, `-p computed_once`: what each run of a process would compute anew, with the same result.

A test process trains hundreds of times. A quarter of that was the check of the data, which forks twice for each run.
"""

import importlib
import inspect
import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from warm import remember_packages

# They are about what the data check reads, or how.
_READ_ANEW = re.compile(r"data_check|data/test_(?!loader|step|order)|test_guarantee|test_early_errors|test_reading")
# Datasets whose samples depend on what they hold, and on nothing else.
_DIGITS = {"tests.samples.Digits", "tests.small.NoisyDigits", "custom.datasets.digits_dataset.DigitsDataset"}
_anew = [True]
os.environ.pop("PYTHONPATH", None)  # programs that tests start need not find this file


def innermost(dataset: Any) -> Any:
    """Return what is in a view of a view."""
    while "whole" in vars(dataset):
        dataset = dataset.whole
    return dataset


class _Values(pickle.Pickler):
    """Of a tensor, its values, not where it is."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return bytes, (obj.numpy().tobytes(),)
        return NotImplemented


def state_of(value: Any) -> bytes:
    """Return what `value` is made of."""
    stream = io.BytesIO()
    _Values(stream).dump(value)
    return stream.getvalue()


def remember_readings(reading: Any) -> None:
    """Keep what other processes read of the digits, whose samples depend on their state alone."""
    read_there: Callable[..., Any] = reading.in_other_process
    known: dict[bytes, Any] = {}

    def in_other_process(loader: Any, seconds: float, function: Any, batches: Any, is_second: bool) -> Any:
        kinds = {type(innermost(part.dataset)) for part in batches.values()}
        if _anew[0] or not {f"{kind.__module__}.{kind.__name__}" for kind in kinds} <= _DIGITS:
            return read_there(loader, seconds, function, batches, is_second)
        methods = [
            id(each)
            for kind in kinds
            for part in kind.__mro__
            for each in vars(part).values()
            if inspect.isfunction(each)
        ]
        state = state_of((batches, is_second, methods))  # a test may put others in their place
        if state not in known:
            known[state] = read_there(loader, seconds, function, batches, is_second)
        return known[state]

    reading.in_other_process = in_other_process


def pytest_collection_finish() -> None:
    """Begin, once the project is imported."""
    remember_packages()
    if "common.trainer" in sys.modules:
        remember_readings(importlib.import_module("parts.data_check.reading"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """For the time of a test, set whether data are read anew."""
    _anew[0] = bool(_READ_ANEW.search(item.nodeid))
    yield
