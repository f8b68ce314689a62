"""The number of a checkpoint's format: earlier ones are converted, step by step, and later ones are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import file
from common.checkpoint.folder import CheckpointFolder
from tests.conftest import ErrorOf, Runs, load, same

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
        assert f"latest.pt has format {file.FORMAT + 1}, written by a later version of this project" in text
        assert f"this one reads formats up to {file.FORMAT}" in text
        assert "Use the code that wrote it (run.json names its commit), or update this: docs/updating.md" in text
    assert sorted(path.name for path in latest.parent.iterdir()) == before


def test_each_change_of_the_format_has_a_reader(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's file, read by a version two formats later, goes through both readers, in their order."""
    folder = runs.train("--progress.max_steps", "4")
    path = folder / "checkpoints" / "latest.pt"
    today = load(folder)

    def to_the_next(state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, "history": [*state.get("history", ()), state["format"]]}

    first = file.FORMAT
    monkeypatch.setattr(file, "FORMAT", first + 2)
    monkeypatch.setattr(file, "READERS", {**file.READERS, first: to_the_next, first + 1: to_the_next})
    read = file.read_checkpoint(path)
    assert (read["history"], read["format"]) == ([first, first + 1], first + 2)
    assert same(read["model"], today["model"])


def test_no_reader_is_missing() -> None:
    assert file.READERS.keys() == set(range(1, file.FORMAT))


def test_a_file_without_a_format_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "x.pt")
    with pytest.raises(file.CheckpointError, match="is not a checkpoint of this project; if it holds only weights"):
        file.read_checkpoint(tmp_path / "x.pt")
