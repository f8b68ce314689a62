"""docs/rows.md says which tests hold what is asked; it must be true."""

import importlib.util
from types import ModuleType

import pytest

from support import REPO, TEMPLATE


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rows", REPO / "tools" / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(rows: ModuleType) -> None:
    table = (REPO / "docs" / "rows.md").read_text(encoding="utf-8")
    assert table == rows.table(rows.rows_of_tests()), "run: python tools/rows.py"


def test_every_row_of_the_spine_has_a_test(rows: ModuleType) -> None:
    found = rows.rows_of_tests()
    assert [row for row in rows.SPINE if not found.get(row)] == []
    inside = f"{TEMPLATE.name}/tests/"
    assert [row for row in rows.SPINE if not any(test.startswith(inside) for test in found[row])] == []
