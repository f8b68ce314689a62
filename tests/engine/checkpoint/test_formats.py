"""The number of a checkpoint's format: another one is refused."""

from pathlib import Path

import pytest
import torch

from common.checkpoint import file
from common.checkpoint.folder import CheckpointFolder
from tests.conftest import ErrorOf, Runs, load

SAVES = ("--progress.epoch_save_latest", "1step", "--progress.epoch_val", "-1")


def test_a_later_format_is_refused_with_what_to_do(runs: Runs, error_of: ErrorOf) -> None:
    """Also where an older file lies beside it: going on from there would lose steps that nothing has damaged."""
    folder = runs.train(*SAVES, "--progress.max_steps", "4")
    latest = folder / "checkpoints" / "latest.pt"
    assert CheckpointFolder(latest.parent).newest() is not None
    state = load(folder)
    latest.unlink()
    torch.save({**state, "format": file.FORMAT + 1}, latest)
    before = sorted(path.name for path in latest.parent.iterdir())
    assert "previous.pt" in before
    for text in (
        error_of(*SAVES, "--resume", "auto"),
        error_of("--model_pt", str(latest), program="evaluate"),
        error_of("--init_from.path", str(latest), "--name", "other"),
    ):
        assert f"latest.pt has format {file.FORMAT + 1}, and this version" in text
        assert "use the code that wrote it (run.json names its commit)" in text
    assert sorted(path.name for path in latest.parent.iterdir()) == before


def test_a_file_without_a_format_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "x.pt")
    with pytest.raises(file.CheckpointError, match="is not a checkpoint of this project; if it holds only weights"):
        file.read_checkpoint(tmp_path / "x.pt")
