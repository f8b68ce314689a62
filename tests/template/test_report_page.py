"""Reports of runs, opened in a real browser without a network; and docs/runs.md, done to the letter."""

import re
import sys
from pathlib import Path

import pytest

from browser import Browser, browser
from real import REPORT
from support import fresh
from test_data_tools import BLOCK, call, python  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

# Where a chart is, and how much of it its curves fill.
CHARTS = """[...document.querySelectorAll('figure')].map(figure => {
    const box = figure.querySelector('svg').getBoundingClientRect();
    const lines = [...figure.querySelectorAll('polyline')].map(line => line.getBoundingClientRect());
    return {title: figure.querySelector('figcaption').innerText, width: box.width, height: box.height,
            lines: lines.length, widest: Math.max(...lines.map(line => line.width)),
            inside: lines.every(line => line.left >= box.left && line.right <= box.right + 1 &&
                                        line.top >= box.top && line.bottom <= box.bottom)};
})"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, settings: Path) -> Path:
    """A rendered project with the runs that docs/runs.md trains, of two seeds."""
    root = fresh(tmp_path_factory.mktemp("out"), settings)
    page = (root / "docs" / "runs.md").read_text()
    (loop,) = [text for kind, text in BLOCK.findall(page) if kind == "sh" and "for seed" in text]
    for seed in re.findall(r"\d", loop.partition(" in ")[2].partition(";")[0])[:2]:
        for line in loop.splitlines():
            if line.strip().startswith("python "):
                call(root, Path(sys.executable), *line.replace("$seed", seed).split()[1:])
    return root


def check_charts(tab: Browser, minimum: int) -> None:
    charts = tab.evaluate(CHARTS)
    assert len(charts) >= minimum
    for chart in charts:
        assert min(chart["width"] / 250, chart["height"] / 120) > 1, chart
        assert chart["widest"] > chart["width"] / 4, chart
        assert chart["inside"], chart


def test_reports_in_a_browser(project: Path, tmp_path: Path) -> None:
    """Light, dark, on a phone and on paper: curves have a size, nothing is loaded, nothing goes wrong."""
    runs = [project / "experiments" / name for name in ("wide_1", "narrow_1", "wide_2")]
    call(project, Path(sys.executable), "-m", "tools.report", *map(str, runs))
    pages = {run.name: run / "report.html" for run in runs[:2]}
    with browser(offline=True) as tab:
        for name, page in pages.items():
            colours = set()
            for dark in (False, True):
                tab.open(page.as_uri(), dark=dark)
                colours.add(tab.evaluate(BACKGROUND))
                check_charts(tab, 4)
                tab.screenshot(tmp_path / f"{name}_{'dark' if dark else 'light'}.png", whole=True)
            assert len(colours) == 2
            assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 10)")
            tab.open(page.as_uri(), width=390, height=800)
            check_charts(tab, 4)
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390
            tab.screenshot(tmp_path / f"{name}_phone.png", whole=True)
            tab.pdf(tmp_path / f"{name}.pdf")
        assert tab.errors == []
        assert {address.partition(":")[0] for address in tab.requests} == {"file", "data"}
    assert all((tmp_path / f"{name}.pdf").stat().st_size > 10_000 for name in pages)
    REPORT.append("report.html of two runs, in Chromium")


def test_the_figure_of_the_page(project: Path, python: Path) -> None:  # noqa: F811 - the fixture
    """docs/runs.md: the code that it prints, with matplotlib; and its commands."""
    blocks = BLOCK.findall((project / "docs" / "runs.md").read_text())
    first, figure = [text for kind, text in blocks if kind == "python"]
    said = call(project, python, "-c", first.replace("experiments/default", "experiments/wide_1"))
    assert said.startswith("finished 95 {'metric': 'loss'")
    (project / "figure.py").write_text(figure)
    call(project, python, "figure.py")
    assert (project / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert (project / "accuracy.png").stat().st_size > 20_000
    table = call(project, Path(sys.executable), "-m", "tools.runs", "--sort", "val.Accuracy")
    assert {"width", "random_seed"} <= set(table.splitlines()[0].split())
    for name in ("wide_1", "narrow_2"):
        assert f"\n{name} " in table
    REPORT.append("docs/runs.md: the figure with matplotlib")
