"""What docs/tools/runs.md shows, done to the letter."""

import re
import sys
from pathlib import Path

import pytest

from real import REPORT
from support import fresh
from test_data_tools import BLOCK, call, python  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, settings: Path) -> Path:
    """A rendered project with the runs that docs/tools/runs.md trains, of two seeds."""
    root = fresh(tmp_path_factory.mktemp("out"), settings)
    page = (root / "docs" / "tools" / "runs.md").read_text()
    (loop,) = [text for kind, text in BLOCK.findall(page) if kind == "sh" and "for seed" in text]
    for seed in re.findall(r"\d", loop.partition(" in ")[2].partition(";")[0])[:2]:
        for line in loop.splitlines():
            if line.strip().startswith("python "):
                call(root, Path(sys.executable), *line.replace("$seed", seed).split()[1:])
    return root


def test_the_figure_of_the_page(project: Path, python: Path) -> None:  # noqa: F811 - the fixture
    """docs/tools/runs.md: the code that it prints, with matplotlib; and its commands."""
    blocks = BLOCK.findall((project / "docs" / "tools" / "runs.md").read_text())
    first, figure = [text for kind, text in blocks if kind == "python"]
    said = call(project, python, "-c", first.replace("experiments/default", "experiments/wide_1"))
    assert said.startswith("finished 95 {'metric': 'loss'")
    (project / "figure.py").write_text(figure)
    call(project, python, "figure.py")
    assert (project / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert (project / "accuracy.png").stat().st_size > 20_000
    table = call(project, Path(sys.executable), "-m", "tools.runs")
    assert {"model.width", "dist.random_seed"} <= set(table.splitlines()[0].split())
    for name in ("wide_1", "narrow_2"):
        assert f"\n{name} " in table
    REPORT.append("docs/tools/runs.md: the figure with matplotlib")
