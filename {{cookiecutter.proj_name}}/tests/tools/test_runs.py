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
from tools.runs.compare import definition, mode, rank_runs
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


def test_different_metrics_are_not_compared(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs ranked by loss and by Accuracy: each has a best one of its own; a damaged run says what is wrong."""
    tool.main([str(experiments)])
    output = capsys.readouterr().out
    assert (
        "Only runs with the same best.metric, computed alike on the same validation data, are ranked together."
        in output
    )
    assert "best by loss of sweep/fast, sweep/slow: sweep/fast, " in output
    assert "best by Accuracy of other: other, " in output
    damaged = next(line for line in output.splitlines() if line.startswith("damaged"))
    assert "killed" in damaged and all(name in damaged for name in ("status.json", "config.yaml", "metrics.jsonl"))
    assert [row["run"] for row in rows_of(capsys, str(experiments))][-1] == "damaged"


def test_different_data_are_not_compared(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs on other validation samples are never the better ones, in the table."""
    for lr in ("1e-4", "1e-2"):
        runs.train("--optim.lr", lr, name=f"all_{lr}")
    runs.train("--dataset.val", "{type: tests.samples.Digits, shift: 2}", name="other")
    tool.main([str(runs.root)])
    head, *lines = capsys.readouterr().out.splitlines()
    ends = {line.partition(" at ")[0].rpartition(", ")[0] for line in lines if line.startswith("best by loss of ")}
    assert ends == {"best by loss of all_1e-2, all_1e-4: all_1e-2", "best by loss of other: other"}
    assert "dataset.val.shift" in head.split()


def test_different_losses_are_not_compared(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller weight makes a smaller loss, not a better model. Metrics and parts of the loss have no weight."""
    weights = ("1", "0.01")
    folders = [runs.train("--loss.CrossEntropyLoss.weight", weight, name=f"w{weight}") for weight in weights]
    tool.main([str(runs.root)])
    output = capsys.readouterr().out
    assert "Only runs with the same best.metric, computed alike" in output
    assert "best by loss of w0.01: w0.01, " in output and "best by loss of w1: w1, " in output
    several = [read_run(each) for each in folders]
    for metric, is_alike in (("Accuracy", True), ("CrossEntropyLoss", True), ("loss", False), ("shifted.loss", False)):
        for run in several:
            run.config["best.metric"] = metric
        assert (len({definition(run) for run in several}) == 1) == is_alike, metric
    for run, size in zip(several, (1, 3), strict=True):  # of metrics, the arguments count
        run.config |= {"metric.Accuracy.k": size, "best.metric": "Accuracy"}
    assert len(rank_runs(several)) == 2


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


@pytest.mark.parametrize(("values", "better"), [([3.0, 1.0, 2.0], "min"), ([1.0, 3.0, 2.0], "max")])
def test_a_run_whose_code_is_gone_is_ranked_by_what_it_called_best(
    tmp_path: Path, values: list[float], better: str
) -> None:
    records = [{"event": "val", "step": step, "values": {"Error": value}} for step, value in enumerate(values)]
    records.append({"event": "checkpoint", "step": 1, "best": True})
    assert mode(RunFiles(tmp_path, "copied", {"best.metric": "Error"}, records=records)) == better
