"""Errors before the run is open, and of evaluations: in files too, and never in the files of others."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from common.failure.program import reported
from common.run.lock import FolderLock
import train
from tests.conftest import Runs
from tests.parts import Plain
from tests.ranks import Ended, start_ranks
from custom.datasets.digits_dataset import DigitsDataset

# A model and a data set that cannot be made, on the rank that the environment names.
BAD = ["--model", "{type: proofs.failure.test_early_errors.unmade}"]
BAD_DATA = ["--dataset.val", "{type: proofs.failure.test_early_errors.unread}"]


def unmade() -> Plain:
    if os.environ.get("RANK", "0") == os.environ.get("BAD_RANK", "0"):
        raise RuntimeError("no such layer")
    return Plain()


def unread(data_dir: Path, mode: str) -> DigitsDataset:
    unmade()
    return DigitsDataset(data_dir, mode)


class Late(DigitsDataset):
    """Takes longer than loader.timeout."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(3)
        return super().__getitem__(index)


def failed(runs: Runs, *words: str, program: str = "train", world: int = 2) -> Ended:
    """Run on several ranks, of which the second fails; all must end within 10 s of another."""
    argv = runs.words(*words) if program == "train" else list(words)
    ended = start_ranks(runs.root, world, argv, program=program, environment={"BAD_RANK": "1"})
    assert ended.codes == [1] * world, "\n".join(ended.texts)
    assert max(ended.seconds) - min(ended.seconds) < 10
    return ended


def alone(runs: Runs, *words: str) -> int:
    """Train in this process; how it ended as a program."""
    with pytest.raises(SystemExit) as ended, reported():
        train.main(runs.words(*words))
    return int(ended.value.code or 0)


def status(folder: Path) -> dict[str, str]:
    return json.loads((folder / "status.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("bad", [BAD, BAD_DATA], ids=["model", "data"])
def test_one_rank_cannot_build(runs: Runs, bad: list[str]) -> None:
    """R-14, D-29: before there is a log: on the terminal, in train.log, in a file of the rank, in status.json."""
    ended = failed(runs, *bad)
    folder = runs.root / "run"
    assert "rank 1 failed" in ended.texts[0] and f"details  {folder}/error_rank1.txt" in ended.texts[0]
    assert "Traceback" in (folder / "error_rank1.txt").read_text()
    assert "rank 1 failed" in (folder / "train.log").read_text()
    assert status(folder)["state"] == "failed"
    assert status(folder)["reason"].startswith("rank 1: RuntimeError: no such layer")
    assert sorted(files(folder)) == ["error_rank1.txt", "status.json", "train.log", "train.rank1.log"]


def test_one_process_cannot_build(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """R-14: without ranks; what is mended starts in that very folder, and the log goes on."""
    folder = runs.root / "run"
    assert alone(runs, *BAD) == 1
    assert capsys.readouterr().err.count("RuntimeError: no such layer") == 2  # the traceback's, and the summary's
    assert sorted(files(folder)) == ["error_rank0.txt", "status.json", "train.log"]
    assert status(folder)["reason"] == "RuntimeError: no such layer"
    runs.train()
    assert len(list(runs.root.glob("run*"))) == 1
    assert not (folder / "error_rank0.txt").exists() and status(folder)["state"] == "finished"
    log = (folder / "train.log").read_text()
    assert log.index("no such layer") < log.index("started again") < log.index("finished at epoch")


@pytest.mark.slow
def test_a_worker_that_is_late(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """What helps against it is the loader's own limit, and not that of waiting for other processes."""
    words = [
        "--dataset.train",
        f"{{type: {__name__}.Late}}",
        "--worker",
        "1",
        "--loader.timeout",
        "1",
    ]
    assert alone(runs, *words) == 1
    text = capsys.readouterr().err
    assert "timed out after 1 seconds" in text and "loader.timeout" in text and "dist.timeout" not in text


@pytest.mark.slow
def test_an_earlier_run_stays_where_it_is(runs: Runs) -> None:
    """R-14: whatever goes wrong before the new run is open, none of the earlier run's files changes."""
    folder = runs.train()
    before = files(folder)
    assert alone(runs, "--model.classes", "5") == 2
    assert files(folder) == before
    failed(runs, *BAD)
    assert len(list(runs.root.glob("run*"))) == 1
    assert files(folder) == before


def test_a_mistake_in_a_new_run_leaves_nothing(runs: Runs) -> None:
    assert alone(runs, "--model.classes", "5") == 2
    assert not (runs.root / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_that_cannot_be_read(runs: Runs, world: int) -> None:
    """R-14, R-46: a run that cannot go on says so in its own record, as a job's script looks for it."""
    folder = runs.train()
    for path in (folder / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    if world == 1:
        assert alone(runs, "--resume", "auto") == 2
    else:
        assert 2 in start_ranks(runs.root, world, runs.words("--resume", "auto")).codes
    assert status(folder)["state"] == "failed"
    reason = status(folder)["reason"]
    assert "checkpoints" in reason
    assert reason.removeprefix("rank 0: ").removeprefix("rank 1: ") in (folder / "train.log").read_text()


def test_weights_that_cannot_be_read(runs: Runs) -> None:
    """R-14: `init_from` fails in the folder that a submission has made, which then says so."""
    (runs.root / "run" / "slurm").mkdir(parents=True)
    assert alone(runs, "--init_from.path", str(runs.root / "none.pt")) == 2
    assert status(runs.root / "run")["state"] == "failed"
    assert "none.pt" in status(runs.root / "run")["reason"]
    assert "none.pt" in (runs.root / "run" / "train.log").read_text()


def test_a_folder_in_use_is_left_alone(runs: Runs) -> None:
    """R-14: another process trains there; whatever goes wrong here is told on the terminal alone."""
    folder = runs.train()
    lock = FolderLock.take(folder / "run.lock")
    before = files(folder)
    assert alone(runs, *BAD) == 1
    assert alone(runs) == 2  # in use
    assert files(folder) == before
    lock.release()


@pytest.mark.slow
def test_evaluate(runs: Runs, capsys: pytest.CaptureFixture[str], evaluated: Callable[..., object]) -> None:
    """R-14: evaluate.py ends in the same way; the traceback lies where the numbers would, the run is as it was."""
    folder = runs.train()
    run_before = {name: text for name, text in files(folder).items() if not name.startswith("eval/")}
    model_pt = folder / "checkpoints" / "latest.pt"
    words = ["--model_pt", str(model_pt), "--dataset.eval", "{type: proofs.failure.test_early_errors.unread}"]
    ended = failed(runs, *words, program="evaluate")
    error = folder / "eval" / "latest" / "error_rank1.txt"
    assert "rank 1 failed" in ended.texts[0] and f"details  {error}" in ended.texts[0]
    assert "Traceback" in error.read_text()
    evaluated(model_pt)
    assert not error.exists()
    assert {name: text for name, text in files(folder).items() if not name.startswith("eval/")} == run_before
