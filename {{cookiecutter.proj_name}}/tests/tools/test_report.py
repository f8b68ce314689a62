"""report.html, and python -m tools.report: pages that need nothing else, with the numbers of metrics.jsonl."""

import json
import os
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from common.base.errors import UserError
from common.trainer import Trainer
from tests.conftest import Runs, metrics
from tools import report as tool
from tools.runs.read import read_run
from tools.runs.report import report, thin, write_report

NAME = "<script>&amp;'run'\"<b>"
EMPTY = {"meta", "img"}


class Page(HTMLParser):
    """What a browser would find: elements, texts, and the addresses that the page asks for. Every element is closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(file.read_text())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.elements if name == tag and attributes.items() <= found.items()]

    def numbers(self) -> set[float]:
        return {float(each["value"] or "") for each in self.all("data")}

    def check_alone(self) -> None:
        """It has no script, and refers to no other file."""
        assert not self.all("script") and not self.all("link") and not self.all("iframe")
        addresses = [each[name] or "" for _, each in self.elements for name in ("src", "href", "data") if name in each]
        assert all(address.startswith("data:image/") for address in addresses)
        assert "@import" not in "".join(self.texts) and "url(" not in "".join(self.texts)


def values_of(folder: Path, event: str, step: int | None = None) -> set[float]:
    entries = [entry for entry in metrics(folder, event) if step in (None, entry["step"])]
    return set(entries[-1]["values"].values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    every = ["--progress.epoch_eval", "1", "--progress.log_every", "1", "--progress.iter_save_progress", "40"]
    return runs.train(*every, "--progress.local_progress", "true", "--batch_size", "4", name=NAME)


def test_a_finished_run_has_a_report(trained: Path) -> None:
    """Its numbers are those of metrics.jsonl; text of the run is text, whatever it contains."""
    page, run = Page(trained / "report.html"), read_run(trained)
    page.check_alone()
    assert run.best is not None
    expected = values_of(trained, "val", run.best["step"]) | values_of(trained, "val") | values_of(trained, "eval")
    assert expected <= page.numbers()
    assert {NAME, "finished"} <= set(page.texts)
    drawn = {str(line["class"]): len(str(line["points"]).split()) for line in page.all("polyline")}
    assert drawn["c0 faint"] == drawn["c0 line"] == len(metrics(trained, "train")) == 80
    assert drawn["c1 line"] == drawn["c2 dots"] == 2  # validation, evaluation
    assert len(page.all("circle", **{"class": "best"})) == 1
    assert [each["aria-label"] for each in page.all("svg")][:2] == ["loss by step", "Accuracy by step"]
    pictures = [str(each["src"]) for each in page.all("img")]
    evaluated = list((trained / "eval" / "epoch_000002").rglob("*.png"))
    shown = [*(trained / "progress" / "train").iterdir(), *(trained / "progress" / "val").iterdir()]
    assert len(pictures) == len(evaluated) + len(shown) > 10  # of each name, the latest
    assert all(each.startswith("data:image/png;base64,") for each in pictures)


def test_several_runs(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a page in its folder, also a run that failed."""
    assert runs.fail("--optim.lr", "1e30", "--optim.optim_type", "SGD", name="bad") != 0
    other = runs.train("--optim.lr", "0.02", name="other")
    (other / "report.html").unlink()
    assert tool.main([str(runs.root)]) == 0
    assert "other/report.html" in capsys.readouterr().out
    page = Page(runs.root / "bad" / "report.html")
    page.check_alone()
    assert {"optim.lr", "failed"} <= set(page.texts)
    assert any("not a finite number" in text for text in page.texts)
    assert values_of(other, "val") <= Page(other / "report.html").numbers()


def test_a_report_costs_little(trained: Path) -> None:
    """Of a long run: curves are thinned without losing a peak, so that the page stays small."""
    run = read_run(trained)
    points = [(at, 1.0 + (at == 7777)) for at in range(1, 20_001)]
    run.records += [{"event": "train", "step": step, "values": {"loss": loss}} for step, loss in points]
    page = report(run)
    assert (7777, 2.0) in thin(points)
    assert len(page) < 400_000
    assert page.count("points=") < 20


def test_a_stopped_run_has_no_report_yet(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was preempted leaves at once. The tool writes the report of any run."""

    def stop(self: Any, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "log", stop)
    assert runs.fail(name="cut") != 0
    folder = runs.root / "cut"
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert not (folder / "report.html").exists()
    assert tool.main([str(folder)]) == 0
    assert any("SIGTERM" in text for text in Page(folder / "report.html").texts)


def test_a_report_that_cannot_be_written(trained: Path, tmp_path: Path) -> None:
    """It ends no run: a warning names the file. The tool says what to do."""
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    write_report(tmp_path / "nowhere")
    logger.remove(number)
    assert any("report.html cannot be written" in line for line in lines)
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report.html cannot be written: .*; choose another place"):
        tool.main([str(folder)])
