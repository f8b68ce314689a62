"""docs/rows.md says which tests hold what is asked; it must be true."""

import importlib.util
import sys
from types import ModuleType

import pytest
import yaml

from support import REPO, TEMPLATE

sys.path.insert(0, str(REPO / "tools"))
import mutate


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


def test_every_row_has_a_fate(rows: ModuleType) -> None:
    """As many as were studied. What is said to hold one is a row of features.md or a test."""
    given, found = yaml.safe_load(rows.OTHERS.read_text(encoding="utf-8")), rows.rows_of_tests()
    assert len({**found, **rows.others()}) == 503
    features = mutate.features()
    for name in given["held"]:
        file, _, test = name.partition("::")
        home = TEMPLATE if mutate.kind_of(file) == "" else REPO
        assert name in features or f"def {test}(" in (home / mutate.path_of(file)).read_text(encoding="utf-8"), name
    assert [other for other in given["same"] if other not in {**found, **rows.others()}] == []


def test_a_project_has_no_row_ids(rows: ModuleType) -> None:
    """They mean nothing there: tools/rows.yaml names the rows of the project's tests, each of which exists."""
    text = {file: file.read_text(encoding="utf-8") for file in TEMPLATE.rglob("*.py")}
    assert [file for file, code in text.items() if rows.ROW.search(code)] == []
    for test in yaml.safe_load(rows.OTHERS.read_text(encoding="utf-8"))["project"]:
        file, _, name = test.partition("::")
        assert f"def {name}(" in text[TEMPLATE / "tests" / file], test


def test_every_row_of_the_spine_has_a_test(rows: ModuleType) -> None:
    found = rows.rows_of_tests()
    assert [row for row in rows.SPINE if not found.get(row)] == []
    of_the_project = (f"{TEMPLATE.name}/tests/", "tests/engine/")
    in_template = {"CT-01"}  # sizes: the owner of a project may let it grow
    spine = [row for row in rows.SPINE if row not in in_template]
    assert [row for row in spine if not any(test.startswith(of_the_project) for test in found[row])] == []
