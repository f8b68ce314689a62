"""python -m tools.runs: a table of runs, with the keys that differ, for people and for programs."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from common.base.errors import UserError
from common.run.paths import RunPaths
from common.run.status import FolderLock
from tests.conftest import Runs, metrics
from tools.runs import __main__ as tool
from tools.runs.compare import rank_runs
from tools.runs.read import RunFiles, read_run


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained runs in a sweep's folder, one run that was ranked by another metric, and a damaged one."""
    root = tmp_path_factory.mktemp("experiments")
    for name, lr in (("slow", "1e-5"), ("fast", "1e-2")):
        Runs(root / "sweep").train("--optim.lr", lr, "--progress.epoch_eval", "2", name=name)
    Runs(root).train("--best.metric", "Accuracy", name="other")
    shutil.copytree(root / "other", root / "damaged")
    for file, text in (("status.json", "{"), ("config.yaml", "a: ["), ("metrics.jsonl", "no\n")):
        (root / "damaged" / file).write_text(text)
    (root / "notes").mkdir()
    return root


def test_the_table_has_the_keys_that_differ_and_the_best_run_last(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in nested folders, sorted by their best validation; the last line is a command that works."""
    assert tool.main([str(experiments / "sweep")]) == 0
    head, *rows, conclusion, command = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["run", "state", "metric", "best", "at", "optim.lr", "eval.Accuracy"]
    assert [row.split()[0] for row in rows] == ["fast", "slow"]
    assert [re.split(" {2,}", row)[5] for row in rows] == ["0.01", "1e-05"]
    assert "width" not in head
    assert conclusion.startswith("best by loss: fast, ")
    words = command.split()
    assert words[:3] == ["python", "evaluate.py", "--model_pt"] and Path(words[-1]).name == "best.pt"
    assert Path(words[-1]).is_file()


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    tool.main([*words, "--csv"])
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_programs_get_every_digit(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--csv has the numbers of metrics.jsonl."""
    sweep = experiments / "sweep"
    fast, slow = rows_of(capsys, str(sweep))
    assert (slow["run"], fast["run"], fast["state"], fast["optim.lr"]) == ("slow", "fast", "finished", "0.01")
    val = {each["step"]: each["values"] for each in metrics(sweep / "fast", "val")}
    assert fast["metric"] == "loss" and float(fast["best"]) == min(each["loss"] for each in val.values())
    assert float(fast["val.Accuracy"]) == val[int(fast["at"])]["Accuracy"]
    assert float(fast["eval.loss"]) == metrics(sweep / "fast", "eval")[-1]["values"]["loss"]
    assert (fast["step"], fast["epoch"]) == ("10", "2")


def test_each_metric_has_a_best_run(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs ranked by loss and by Accuracy: each has a best one of its own; a damaged run says what is wrong."""
    tool.main([str(experiments)])
    output = capsys.readouterr().out
    assert "best by loss: sweep/fast, " in output and "best by Accuracy: other, " in output
    assert "measure alike" not in output
    damaged = next(line for line in output.splitlines() if line.startswith("damaged"))
    assert "killed" in damaged and all(name in damaged for name in ("status.json", "config.yaml", "metrics.jsonl"))
    assert [row["run"] for row in rows_of(capsys, str(experiments))][-1] == "damaged"


def test_runs_on_other_data_are_not_ranked_without_a_word(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Other validation samples or another loss: the table has the keys, and the conclusion names them."""
    for lr in ("1e-4", "1e-2"):
        runs.train("--optim.lr", lr, name=f"all_{lr}")
    runs.train("--dataset.val", "{type: tests.samples.Digits, shift: 2}", name="other")
    runs.train("--loss.CrossEntropyLoss.weight", "0.01", name="small")
    tool.main([str(runs.root)])
    head, *lines = capsys.readouterr().out.splitlines()
    assert "dataset.val.shift" in head.split()
    sentence = next(line for line in lines if line.startswith("Compare only runs that measure alike"))
    assert "dataset.val.shift" in sentence and "loss.CrossEntropyLoss.weight" in sentence and "lr" not in sentence


def test_mistakes_have_one_clear_sentence(experiments: Path) -> None:
    with pytest.raises(UserError, match=r"there are no runs in .*notes: a run is a folder with"):
        tool.main([str(experiments / "notes")])
    with pytest.raises(UserError, match=r"there are no runs in .*ntoes"):
        tool.main([str(experiments / "ntoes")])


def test_a_killed_run_is_not_running(experiments: Path, tmp_path: Path) -> None:
    """Its status still says so; but no process holds its lock."""
    folder = shutil.copytree(experiments / "other", tmp_path / "other")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "running", "reason": ""}))
    lock = FolderLock.take(RunPaths(folder).lock_file)
    assert read_run(folder).state == "running"
    lock.release()
    assert read_run(folder).state == "killed"
    lock.path.touch()  # as a killed process leaves it
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "val", "step": 99, "values": {"loss": "NaN"}}\n{"event": "va')
    run = read_run(folder)
    assert (run.state, run.step, run.problems) == ("killed", 99, [])
    assert run.best is not None and run.best["metric"] == "Accuracy"


@pytest.mark.parametrize(("mode", "first"), [("min", "low"), ("max", "high")])
def test_a_run_is_ranked_by_what_it_called_better(tmp_path: Path, mode: str, first: str) -> None:
    """Its record says so, of any metric, also if the code is gone."""
    found = []
    for name, value in (("low", 1.0), ("high", 2.0)):
        val = {"event": "val", "step": 1, "values": {"Error": value}}
        saved = {"event": "checkpoint", "step": 1, "best": True, "mode": mode}
        found.append(RunFiles(tmp_path, name, {"best.metric": "Error"}, records=[val, saved]))
    assert rank_runs(found)[0][0].name == first


def test_the_record_says_which_values_are_better(experiments: Path) -> None:
    for name, mode in (("other", "max"), ("sweep/fast", "min")):
        best = read_run(experiments / name).best
        assert best is not None and best["mode"] == mode
