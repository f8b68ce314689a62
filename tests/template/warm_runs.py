"""A pytest plugin, `-p warm_runs`: Python programs that tests start are forked from one that has torch imported.

A program of two training steps then takes 0.6 s of the processor instead of 3. It is another process of the system,
so tests of what the system does with processes keep their own.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from warm import warm_python

# They are about groups of processes, limits, exit codes, signals; a program that was forked outlives the process that
# a test kills, if by a moment only.
OWN_PROCESSES = re.compile(
    r"""run/test_machines | test_signals | test_a_signal | killed
    | test_two_runs_never_write_one_folder | test_a_batch_that_cannot_be_sent | test_elastic_with_a_node_less
    | test_an_elastic_restart_with_fewer | test_how_a_process_ended | test_an_interrupt_leaves_nothing_behind
    | template/test_(?!add|check|export|leaves|update)""",
    re.VERBOSE,
)
# The longest tests, which would otherwise run alone at the end.
LONG = re.compile("test_the_recipe_to_the_letter|test_the_everyday_tests_of_the_core|test_each_combination_works")
OWN = sys.executable
_session = ExitStack()
_warm: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests."""
    items.sort(key=lambda item: not LONG.match(item.name))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """For the time of a test, `sys.executable` is what forks."""
    if not OWN_PROCESSES.search(f"{item.path.as_posix()}::{item.name}"):
        if not _warm:
            _warm.append(str(_session.enter_context(warm_python()) / "python"))
        sys.executable = _warm[0]
    yield
    sys.executable = OWN


def pytest_sessionfinish() -> None:
    """End what the programs were forked from."""
    _session.close()
