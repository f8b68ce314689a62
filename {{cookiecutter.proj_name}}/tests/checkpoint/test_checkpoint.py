"""Checkpoints that cannot be lost, and files of weights."""

import errno
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import UserError
from common.checkpoint.file import read_checkpoint
from common.checkpoint.folder import CheckpointFolder
import train
from tests.conftest import Runs, load, metrics, same

SAVES = [
    "--progress.epoch_save_latest", "1step", "--progress.epoch_val", "-1", "--progress.epoch_save_checkpoint", "-1",
]  # fmt: skip


def state(step: int, size: int = 1) -> dict[str, Any]:
    """Return a checkpoint that can tell whether it is whole: all its numbers are its step."""
    weights = {"weight": torch.full((size,), float(step))}
    return {"format": 1, "model": weights, "position": {"step": step}, "values": {}}


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "bit":
        weights = next(iter(read_checkpoint(path)["model"].values()))
        data[data.index(weights.numpy().tobytes())] ^= 1
    path.unlink()  # the other names of the file stay whole
    path.write_bytes(
        {"empty": b"", "zeros": bytes(len(data)), "cut": bytes(data[: len(data) * 9 // 10]), "bit": bytes(data)}[how]
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after 4 steps; to be copied."""
    return Runs(tmp_path_factory.mktemp("begun")).train(*SAVES, "--progress.max_steps", "4")


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same run ends with if it is never stopped."""
    return load(Runs(tmp_path_factory.mktemp("uncut")).train(*SAVES))


@pytest.mark.parametrize("how", ["empty", "zeros", "cut", "bit"])
def test_a_damaged_newest_falls_back(runs: Runs, begun: Path, uncut: dict[str, Any], how: str) -> None:
    """The one before is used, with a warning that names the file; the result is that of the uncut run."""
    folder = Path(shutil.copytree(begun, runs.root / "run"))
    damage(folder / "checkpoints" / "latest.pt", how)
    runs.train(*SAVES, "--resume", "auto")
    log = (folder / "train.log").read_text()
    assert "latest.pt" in log and "trying the one before it" in log and "previous.pt, step 3" in log
    assert same(uncut["model"], load(folder)["model"])
    assert (folder / "checkpoints" / "abandoned_latest.pt").is_file()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("out of memory")])
def test_what_cannot_be_read_is_not_replaced(
    runs: Runs, begun: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The resume ends with the reason; no older file takes the place of the newest, which may be whole."""
    folder = Path(shutil.copytree(begun, runs.root / "run")) / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    whole = zipfile.ZipFile

    def broken(path: Path, *more: Any) -> zipfile.ZipFile:
        if path.name == "latest.pt":
            raise error
        return whole(path, *more)

    monkeypatch.setattr(zipfile, "ZipFile", broken)
    with pytest.raises(UserError, match=f"latest.pt cannot be read: {error.args[-1]}"):
        runs.train(*SAVES, "--resume", "auto")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    runs.train(*SAVES, "--resume", "auto")
    assert "resumed at step 4" in (runs.root / "run" / "train.log").read_text()


def test_the_one_before_is_another_file(tmp_path: Path) -> None:
    """Not a second name of the newest: one damaged block cannot take both, also after falling back."""
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(state(step), best=True)
    assert read_checkpoint(folder.previous)["position"]["step"] == 2
    assert not folder.latest.samefile(folder.previous)
    damage(folder.latest, "bit")
    found = folder.newest()
    assert found and found.path == folder.best
    damage(folder.best, "bit")
    found = folder.newest()
    assert found and found.path == folder.previous
    folder.rewind_to(found.path, found.step)
    names = {path.name: path.stat().st_nlink for path in tmp_path.iterdir()}
    assert names == {"latest.pt": 1, "abandoned_latest.pt": 1, "abandoned_best.pt": 1}


def test_what_is_kept(tmp_path: Path) -> None:
    """The newest `keep`; best and latest beside."""
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(10, 110, 10):
        folder.save(state(step), numbered=True, best=step == 30)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "latest.pt", "previous.pt", "step_00000090.pt", "step_00000100.pt"]
    assert read_checkpoint(folder.best)["position"]["step"] == 30


def test_nothing_that_was_saved_vanishes(runs: Runs) -> None:
    """Resuming an older file of the same run: a newer latest.pt is kept beside, however often that is done."""
    words = ["--progress.epoch_save_checkpoint", "-1", "--best.min_delta", "100"]  # so the first is the best
    folder = runs.train(*words, "--progress.epoch", "3")
    best = folder / "checkpoints" / "best.pt"
    kept = {15: load(folder)["model"]}
    for step, name in ((10, "abandoned_latest"), (5, "abandoned_latest-2")):
        runs.train(*words, "--progress.max_steps", str(step), "--resume", str(best))
        kept[step] = load(folder)["model"]
        assert (
            f"latest.pt (step {step + 5}) is not the checkpoint being resumed; renamed to {name}.pt"
            in (folder / "train.log").read_text()
        )
        assert same(load(folder, name)["model"], kept[step + 5])
    runs.train(*words, "--progress.epoch", "4", "--resume", str(best.with_name("abandoned_latest.pt")))
    assert load(folder)["position"]["step"] == 20
    assert {path.name for path in best.parent.glob("abandoned_latest*")} == {
        "abandoned_latest.pt", "abandoned_latest-2.pt", "abandoned_latest-3.pt",
    }  # fmt: skip


def test_an_early_stop_stays_stopped(runs: Runs) -> None:
    """After two validations without a better value; a job that is started again trains on only with more patience."""
    words = ["--model", "{type: tests.small.Plain}", "--optim.lr", "1e-30", "--progress.epoch", "9"]
    folder = runs.train(*words, "--early_stop.patience", "2")
    assert metrics(folder, "end")[-1]["reason"] == "early_stop"
    assert load(folder)["position"]["step"] == 15
    runs.train(*words, "--early_stop.patience", "2", "--resume", "auto")
    assert load(folder)["position"]["step"] == 15
    runs.train(*words, "--early_stop.patience", "3", "--resume", "auto")
    assert load(folder)["position"]["step"] == 20


def test_changes_of_the_config(runs: Runs) -> None:
    """Shown key by key; harmless ones taken, others refused with the flag that overrides."""
    folder = runs.train("--progress.epoch", "1")
    config = ["--resume", str(folder)]
    assert runs.fail(*config, "--optim.lr", "0.5", "--num_workers", "1") == 2
    log = (folder / "train.log").read_text()
    assert "optim.lr 0.001 -> 0.5" in log
    assert "--allow_changes true" in log
    assert "num_workers: 0 in" not in log
    runs.train(*config, "--optim.lr", "0.5", "--allow_changes", "true")
    log = (folder / "train.log").read_text()
    assert "  optim.lr 0.001 -> 0.5" in log.split("changed since then")[1]
    assert "not guaranteed to be bit-exact or sample-exact: optim.lr 0.001 -> 0.5" in log
    assert metrics(folder, "train")[-1]["values"]["lr"] == 0.5
    assert load(folder)["position"]["epoch"] == 2


def test_a_run_is_resumed_with_its_own_config(runs: Runs) -> None:
    """Without --config, and with the changes on the command line."""
    folder = runs.train("--progress.epoch", "1", "--optim.lr", "0.005")
    assert train.main(["--resume", str(folder), "--progress.epoch", "3"]) == 0
    assert "whether a fresh run with this progress.epoch has the same schedules" in (folder / "train.log").read_text()
    assert load(folder)["position"]["epoch"] == 3
    assert train.main(["--resume", str(folder / "checkpoints" / "best.pt"), "--progress.epoch", "4"]) == 0
    assert load(folder)["position"]["epoch"] == 4
    assert (folder / "config.resume-2.yaml").is_file()


def init(runs: Runs, path: Path, more: str = "", *words: str) -> Path:
    section = f"{{path: {path}{', ' + more if more else ''}}}"
    return runs.train("--init_from", section, "--optim.lr", "1e-30", "--progress.max_steps", "1", *words, name="tuned")


def test_init_from(runs: Runs, tmp_path: Path) -> None:
    """Prefix, rename, exclude, strict, and a report of what did not fit."""
    source = runs.train("--progress.epoch", "1", name="source") / "checkpoints" / "best.pt"
    weights = load(source.parents[1], "best")["model"]
    assert torch.equal(load(init(runs, source))["model"]["head.2.weight"], weights["head.2.weight"])
    foreign = {f"module.net.{key.replace('features', 'body')}": value for key, value in weights.items()}
    torch.save({"state_dict": foreign}, tmp_path / "foreign.pt")
    folder = init(runs, tmp_path / "foreign.pt", "prefix: state_dict.module.net., rename: [[^body, features]]")
    assert torch.equal(load(folder)["model"]["features.0.0.weight"], weights["features.0.0.weight"])
    assert "of the model from" in (folder / "train.log").read_text()

    def error_of(*arguments: str) -> str:
        with pytest.raises(UserError) as caught:
            runs.train("--init_from", f"{{path: {arguments[0]}{arguments[1]}}}", *arguments[2:], name="bad")
        return str(caught.value)

    assert "no key of the file fits the model" in error_of(str(tmp_path / "foreign.pt"), "")
    assert "no key of the file fits" in error_of(str(tmp_path / "foreign.pt"), ", strict: false")
    text = error_of(str(source), "", "--model.classes", "17")
    assert "size mismatch for head.2.weight" in text
    folder = init(runs, source, "exclude: ['head.2.*']", "--model.classes", "10")
    assert not torch.equal(load(folder)["model"]["head.2.weight"], weights["head.2.weight"])
    assert "there is no checkpoint" in error_of(str(tmp_path / "none.pt"), "")
