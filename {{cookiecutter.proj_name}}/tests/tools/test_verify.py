"""python -m tools.verify: a run is replayed and compared, and what has changed since is named."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.base.errors import UserError
from common.run.status import FolderLock
from tests.conftest import ENVIRONMENT, Runs, copy_of_project, run
from tools.verify.__main__ import main

SAVES = ["--progress.epoch_save_checkpoint", "1"]


class Pictures:
    """Pictures of digits as files of 64 bytes, and their labels in memory."""

    classes = tuple("0123456789")

    def __init__(self, folder: str) -> None:
        self.files = sorted(map(str, Path(folder).glob("*.raw")))
        self.labels = torch.arange(len(self.files)) % 10

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = np.fromfile(self.files[index], np.uint8).astype(np.float32)
        return {"image": torch.from_numpy(pixels).reshape(1, 8, 8) / 255, "label": self.labels[index]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two runs of two epochs: `digits`, of arrays in memory, and `pictures`, of 80 files."""
    runs = Runs(tmp_path_factory.mktemp("verify"))
    (folder := runs.root / "pictures.data").mkdir()
    for number in range(80):
        np.random.default_rng(number).integers(0, 256, 64, np.uint8).tofile(folder / f"{number:03}.raw")
    data = f"{{type: tests.tools.test_verify.Pictures, folder: {folder}}}"
    torch.set_num_threads(1)
    runs.train(*SAVES, name="digits")
    runs.train("--dataset.train", data, "--dataset.val", data, "--dataset.eval", "null", name="pictures")
    return runs


@pytest.fixture
def copies(trained: Runs, tmp_path: Path, restored_log: None) -> Runs:
    """Copies of both runs, to be changed."""
    for name in ("digits", "pictures"):
        shutil.copytree(trained.root / name, tmp_path / name)
    return Runs(tmp_path)


def test_a_run_is_verified(copies: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """From its oldest checkpoint to its newest one; the run keeps all its files as they were."""
    folder = copies.root / "digits"
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "replays steps 6 to 10; log: " in out
    assert "verified: " in out and " are equal to the last bit" in out
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert "changed since the run" not in out and "not compared" not in out


def test_what_cannot_be_verified(copies: Runs) -> None:
    folder = copies.root / "digits"
    with pytest.raises(UserError, match="is not the folder of a run"):
        main([str(copies.root)])
    with pytest.raises(UserError, match=r"--from other\.pt: choose one of step_00000005\.pt, start"):
        main([str(folder), "--from", "other.pt"])
    lock = FolderLock.take(folder / "run.lock")
    with pytest.raises(UserError, match=r"is in use by process \d+ .*; verify the run when that has ended"):
        main([str(folder)])
    lock.release()


@pytest.mark.slow
def test_a_changed_line_is_named(tmp_path: Path) -> None:
    """In the user's own folder, even if it changes no bit."""
    project, runs = copy_of_project(tmp_path / "project"), Runs(tmp_path / "runs")
    variables = {**ENVIRONMENT, "PYTHONPATH": str(project)}
    command = [sys.executable, "train.py", *runs.words(*SAVES)]
    assert run(command, cwd=project, env=variables, timeout=600).returncode == 0
    file = project / "common" / "optim" / "clip.py"
    command = [sys.executable, "-m", "tools.verify", str(runs.root / "run")]
    file.write_text(file.read_text() + "# a line\n")
    ended = run(command, cwd=project, env=variables, timeout=600)
    assert ended.returncode == 0 and "are equal to the last bit" in ended.stdout, ended
    assert "changed since the run:\n  the code changed: common/optim/clip.py\n" in ended.stdout, ended


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--dist.processes", "2", "--batch_size", "16"], ["--optim.clip_gradients", "0.5", "--num_workers", "2"]]
)
def test_a_stopped_and_resumed_run_is_verified_from_the_start(
    words: list[str], runs: Runs, restored_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two processes, and with clipping and workers; stopped inside the second epoch."""
    loss = ["--loss", "{$REPLACE: true, ce: {type: tests.small.Signalled}}"]
    command = [sys.executable, "train.py", *runs.words(*SAVES, *loss, *words)]
    # SIGTERM in the seventh step: several processes stop some steps later, together.
    stopped = run(command, env={**ENVIRONMENT, "SIGNAL_AT": "7 15"}, timeout=600)
    assert stopped.returncode == 143, stopped
    assert run([*command, "--resume", "auto"], timeout=600).returncode == 0
    assert main([str(runs.root / "run"), "--from", "start"]) == 0
    out = capsys.readouterr().out
    assert "replays steps 1 to 10; " in out
    assert "verified: " in out


@pytest.mark.slow
def test_how_far_apart(trained: Runs, copies: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Other data: they are named, and the first measurement that differs, and tensors by how much."""
    file = trained.root / "pictures.data" / "005.raw"
    pixels = file.read_bytes()
    file.write_bytes(bytes(255 - each for each in pixels))
    assert main([str(copies.root / "pictures"), "--from", "start"]) == 1
    file.write_bytes(pixels)
    out = capsys.readouterr().out
    assert " measurements differ:\n" in out
    assert re.search(r"    model\.\S+: up to \S+, in \d+ of \d+ numbers", out)
    assert "changed since the run:\n  sample " in out and "of dataset.train: " in out
