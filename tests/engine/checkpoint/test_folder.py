"""The run's folder is renamed, deleted or replaced during training."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import UserError
import train
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several

SAVES = ["--progress.epoch_save_latest", "1step", "--progress.epoch_val", "1", "--progress.log_every", "1"]


PLUGIN = ["--plugins", "[engine.checkpoint.test_folder:vanish]"]


def vanish(trainer: Any) -> None:
    """A plugin: after the third step, do to the run's folder what VANISH says."""
    stepped, root = trainer.monitor.step_done, Path(trainer.paths.root)

    def step_done(at: Any, samples: int) -> None:
        stepped(at, samples)
        if at.step != 3 or not trainer.rank.is_main:
            return
        trainer.saver.wait()
        how = os.environ["VANISH"]
        if how in ("renamed", "replaced"):
            root.rename(root.with_name("elsewhere"))
        elif how == "deleted":
            while root.exists():  # the writer of TensorBoard may add a file meanwhile
                shutil.rmtree(root, ignore_errors=True)
        elif how == "lock":
            (root / "run.lock").unlink()
        elif how == "checkpoints":
            shutil.rmtree(root / "checkpoints")
        if how == "replaced":  # another run took the name
            (root / "checkpoints").mkdir(parents=True)
            (root / "run.json").write_text('{"attempts": []}')
            (root / "checkpoints" / "latest.pt").write_text("another run's")

    trainer.monitor.step_done = step_done


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to whose folder nothing happens."""
    return Runs(tmp_path_factory.mktemp("uncut")).train(*SAVES)


@pytest.mark.parametrize(
    "how", ["renamed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("deleted", "checkpoints", "lock"))]
)
def test_the_folder_is_made_again(runs: Runs, uncut: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It has the checkpoints, and can be resumed; the log and the numbers stay in the folder that was moved."""
    monkeypatch.setenv("VANISH", how)
    folder = runs.train(
        *SAVES, "--plugins", "[engine.checkpoint.test_folder:vanish]", "--monitor.writers", "[tensorboard]"
    )
    assert same(load(folder)["model"], load(uncut)["model"])
    assert not (folder / "run.lock").exists()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    if how != "deleted":
        moved = folder
        if how == "renamed":
            moved = folder.with_name("elsewhere")
        log = (moved / "train.log").read_text()
        assert log.count("was moved or deleted") == (how == "renamed")
        for event in ("train", "val"):
            values = [entry["values"] for entry in metrics(moved, event)]
            assert values == [entry["values"] for entry in metrics(uncut, event)]
    assert train.main(["--resume", str(folder), "--progress.max_steps", "11", "--progress.epoch", "3"]) == 0
    assert load(folder)["position"]["step"] == 11


@pytest.mark.slow
def test_another_run_is_never_overwritten(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one ends, with an error that names the folder; what it has saved is in the folder that was moved."""
    monkeypatch.setenv("VANISH", "replaced")
    assert runs.fail(*SAVES, *PLUGIN) == 2
    folder = runs.root / "run"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name: path.read_text() for path in files} == {
        "run.json": '{"attempts": []}',
        "latest.pt": "another run's",
    }
    moved = folder.with_name("elsewhere")
    log = (moved / "train.log").read_text()
    assert f"{folder} belongs to another run by now, and stays as it is" in log and "to resume:" not in log
    monkeypatch.setenv("VANISH", "")
    assert train.main(["--resume", str(moved)]) == 0
    assert load(moved)["position"]["epoch"] == 2


@pytest.mark.slow
def test_on_two_processes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VANISH", "renamed")
    several(runs, 2, runs.words(*SAVES, *PLUGIN, "--model", "{type: tests.small.Plain}"))
    folder = runs.root / "run"
    assert load(folder)["position"]["epoch"] == 2
    assert (folder.with_name("elsewhere") / "train.rank1.log").is_file()


@pytest.mark.slow
def test_a_run_that_was_moved_continues_where_it_is(runs: Runs, tmp_path: Path) -> None:
    """And leaves alone the run that has its old name by now."""
    folder = runs.train("--progress.epoch", "1")
    (tmp_path / "disk").mkdir()
    moved = folder.rename(tmp_path / "disk" / "other")
    runs.train("--progress.epoch", "1", "--optim.lr", "0.5")
    before = load(folder)
    assert train.main(["--resume", str(moved), "--progress.epoch", "2"]) == 0
    assert load(moved)["position"]["epoch"] == 2
    assert same(load(folder), before) and [path.name for path in runs.root.glob("run*")] == ["run"]
    assert train.main(["--resume", str(moved), "--progress.epoch", "3", "--name", "third"]) == 0
    assert load(moved)["position"]["epoch"] == 2
    assert load(moved.with_name("third"))["position"]["epoch"] == 3
    assert train.main(["--resume", str(moved), "--progress.epoch", "3", "--dir.runs_dir", str(tmp_path)]) == 0
    assert load(moved)["position"]["epoch"] == 2
    assert load(tmp_path / "other")["position"]["epoch"] == 3
    assert train.main(["--resume", str(moved), "--progress.epoch", "3", "--dir.runs_dir", str(moved.parent)]) == 0
    assert load(moved)["position"]["epoch"] == 3


@pytest.mark.slow
def test_a_resume_does_not_need_the_first_weights(runs: Runs, tmp_path: Path) -> None:
    """The checkpoint has them all; if it leaves some out, their file is read."""
    best = runs.train("--progress.epoch", "1", name="source") / "checkpoints" / "best.pt"
    weights = Path(shutil.copy(best, tmp_path / "weights.pt"))
    words = ["--init_from.path", str(weights), "--prepare.freeze", "['features.*']"]
    folder = runs.train(*words, "--progress.epoch", "1")
    left_out = runs.train(*words, "--progress.epoch", "1", "--checkpoint.frozen", "false", name="less")
    weights.unlink()
    runs.train(*words, "--resume", str(folder))
    with pytest.raises(UserError, match=r"there is no checkpoint .*weights.pt"):
        runs.train(*words, "--resume", str(left_out), "--checkpoint.frozen", "false", name="less")
