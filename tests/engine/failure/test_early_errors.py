"""Errors before the run is open, which touch no files, and of evaluations."""

import json
import os
import time
from pathlib import Path

import pytest
from torch import Tensor

from common.failure.program import report_errors
from common.run.status import FolderLock
import train
from tests.conftest import Runs
from tests.ranks import Ended, start_ranks
from tests.small import Plain
from custom.datasets.digits_dataset import DigitsDataset

# A model and a dataset that cannot be made, on the rank that the environment names.
BAD = ["--model", "{type: engine.failure.test_early_errors.unmade}"]
BAD_DATA = ["--dataset.val", "{type: engine.failure.test_early_errors.unread}"]


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
    with pytest.raises(SystemExit) as ended, report_errors():
        train.main(runs.words(*words))
    return int(ended.value.code or 0)


def status(folder: Path) -> dict[str, str]:
    return json.loads((folder / "status.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("bad", [BAD, BAD_DATA], ids=["model", "data"])
def test_one_rank_cannot_build(runs: Runs, bad: list[str]) -> None:
    """Before there is a folder: on the terminal, once, with the rank."""
    ended = failed(runs, *bad)
    assert "rank 1 failed" in ended.texts[0] and "RuntimeError: no such layer" in ended.texts[0]
    assert "Traceback" in ended.texts[0] and ended.texts[1] == ""
    assert not (runs.root / "run").exists()


def test_one_process_cannot_build(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ranks."""
    assert alone(runs, *BAD) == 1
    assert capsys.readouterr().err.count("RuntimeError: no such layer") == 2  # the traceback's, and the summary's
    assert not (runs.root / "run").exists()


@pytest.mark.slow
def test_a_worker_that_is_late(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """What helps against it is the loader's own limit, and not that of waiting for other processes."""
    words = [
        "--dataset.train",
        f"{{type: {__name__}.Late}}",
        "--num_workers",
        "1",
        "--loader.timeout",
        "1",
    ]
    assert alone(runs, *words) == 1
    text = capsys.readouterr().err
    assert "timed out after 1 seconds" in text and "loader.timeout" in text and "dist.timeout" not in text


@pytest.mark.slow
def test_an_earlier_run_stays_where_it_is(runs: Runs) -> None:
    """Whatever goes wrong before the new run is open, none of the earlier run's files changes."""
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
def test_a_checkpoint_that_cannot_be_read(runs: Runs, world: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The run that cannot continue is named, and stays as it is."""
    folder = runs.train()
    for path in (folder / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    before = files(folder)
    if world == 1:
        assert alone(runs, "--resume", "auto") == 2
        text = capsys.readouterr().err
    else:
        ended = start_ranks(runs.root, 2, runs.words("--resume", "auto"))
        assert 2 in ended.codes
        text = "".join(ended.texts)
    assert f"{folder}/checkpoints" in text
    assert files(folder) == before


def test_a_folder_in_use_is_left_alone(runs: Runs) -> None:
    """Another process trains there; whatever goes wrong here is reported on the terminal alone."""
    folder = runs.train()
    lock = FolderLock.take(folder / "run.lock")
    before = files(folder)
    assert alone(runs, *BAD) == 1
    assert alone(runs) == 2  # in use
    assert files(folder) == before
    lock.release()


@pytest.mark.slow
def test_evaluate(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """evaluate.py ends in the same way; the run is as it was."""
    folder = runs.train()
    run_before = {name: text for name, text in files(folder).items() if not name.startswith("eval/")}
    model_pt = folder / "checkpoints" / "latest.pt"
    words = ["--model_pt", str(model_pt), "--dataset.eval", "{type: engine.failure.test_early_errors.unread}"]
    ended = failed(runs, *words, program="evaluate")
    assert "rank 1 failed" in ended.texts[0] and "Traceback" in ended.texts[0]
    assert {name: text for name, text in files(folder).items() if not name.startswith("eval/")} == run_before
