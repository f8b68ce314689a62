"""docs/features.md names pages, tests and tools that exist."""

import ast
import re
from collections.abc import Iterator

import pytest

from support import REPO, TEMPLATE

PAGE = (REPO / "docs" / "features.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.count("|") == 5]
FEATURES = [row for row in ROWS if row[0] != "What" and not set(row[0]) <= set("-")]


def test_there_are_many() -> None:
    assert len(FEATURES) > 60
    assert len({row[0] for row in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize("row", FEATURES, ids=[row[0] for row in FEATURES])
def test_a_feature_has_a_page_and_a_test(row: list[str]) -> None:
    _, how, page, test = row
    assert (TEMPLATE / page).is_file(), page
    file, _, name = test.strip("`").partition("::")
    home = REPO if file.startswith("template:") else TEMPLATE
    path = home / "tests" / file.removeprefix("template:")
    assert path.is_file(), test
    assert not name or name in names_in(path.read_text(encoding="utf-8")), test
    for tool in re.findall(r"python -m tools\.(\w+)", how):
        assert (TEMPLATE / "tools" / f"{tool}.py").is_file(), tool


def names_in(text: str) -> Iterator[str]:
    return (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
