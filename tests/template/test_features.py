"""docs/features.md names pages, tests and tools that exist, and each of its rows has faults that fit the code."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest

from support import REPO, TEMPLATE

sys.path.insert(0, str(REPO / "tools"))
import mutate

PAGE = (REPO / "docs" / "features.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.count("|") == 5]
FEATURES = [row for row in ROWS if row[0] != "What" and not set(row[0]) <= set("-")]
FAULTS = mutate.faults()


def test_there_are_many() -> None:
    assert len(FEATURES) > 60
    assert len({row[0] for row in FEATURES}) == len(FEATURES)
    assert len(FAULTS) >= 120
    assert len({(fault.row, fault.says) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("row", FEATURES, ids=[row[0] for row in FEATURES])
def test_a_feature_has_a_page_tests_and_faults(row: list[str]) -> None:
    what, how, page, cell = row
    assert (TEMPLATE / page).is_file(), page
    tests = mutate.features()[what]
    assert cell == "<br>".join(f"`{test}`" for test in tests), "name each test as file.py::test"
    for test in tests:
        file, _, name = test.partition("::")
        home = TEMPLATE if mutate.kind_of(file) == "" else REPO
        assert name in names_in((home / mutate.path_of(file)).read_text(encoding="utf-8")), test
    for tool in re.findall(r"python -m tools\.(\w+)", how):
        assert any((TEMPLATE / "tools" / file).is_file() for file in (f"{tool}.py", f"{tool}/__main__.py")), tool
    mine = [fault for fault in FAULTS if fault.row == what]
    assert mine, "write a fault into tools/faults/, that one of its tests catches"
    for fault in mine:
        assert fault.test.partition("[")[0] in tests, f"{fault.says}: name {fault.test} in the row"


def test_every_fault_still_fits_the_code() -> None:
    """Its row exists, its old text occurs once in its file, and what it makes of the file can be compiled."""
    rows, problems = {row[0] for row in FEATURES}, []
    for fault in FAULTS:
        if fault.row not in rows:
            problems.append(f"{fault.says}: docs/features.md has no row {fault.row!r}")
        try:
            mutate.broken(fault)
        except ValueError as error:
            problems.append(f"{fault.says}: {error}")
    assert problems == [], "python tools/mutate.py --check"


def test_the_page_has_the_outcome_of_every_fault() -> None:
    """As `make mutate` wrote it. It may not know those that were added since, and at most 3 % may be missed."""
    outcomes = mutate.recorded(mutate.PAGE.read_text(encoding="utf-8"))
    assert set(outcomes) == {(fault.row, fault.says) for fault in FAULTS}, "make mutate, or FAULTS=... for some"
    missed = [fault for fault, outcome in outcomes.items() if not outcome.startswith("caught")]
    assert len(missed) <= 0.03 * len(FAULTS), missed


def names_in(text: str) -> Iterator[str]:
    return (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
