"""`checkpoint.after_save`: functions that get each saved file."""

import shutil
from pathlib import Path

import pytest

from common.config import ConfigError
from parts.after_save.calls import Saved
from tests.conftest import PROJECT, Runs, load, same

HERE = "tests.parts.after_save.test_after_save"


def copy(saved: Saved, to: str) -> None:
    """Copy the file; at step 5, the disk cannot be reached."""
    if saved.step == 5:
        raise ConnectionError("no route to host")
    shutil.copyfile(saved.path, Path(to) / f"{saved.name}.{saved.step}")


def test_each_file_is_handed_over_and_a_failure_is_said(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Training continues meanwhile, to the same weights; in the end nothing is left over."""
    words = ("--progress.epoch_save_latest", "1", "--progress.epoch_save_checkpoint", "2")
    plain = runs.train(*words, name="plain")
    (there := runs.root / "there").mkdir()
    section = f"[{{type: '{HERE}:copy', to: {there}}}]"
    folder = runs.train(*words, "--checkpoint.after_save", section, name="copied")
    assert same(load(folder)["model"], load(plain)["model"])
    for name in ("latest.pt", "best.pt", "step_00000010.pt"):
        assert (there / f"{name}.10").read_bytes() == (folder / "checkpoints" / name).read_bytes()
    said = capsys.readouterr().err
    assert f"{HERE}:copy" in said
    assert "failed with latest.pt of step 5: ConnectionError: no route to host" in said
    assert not list(folder.glob("checkpoints/.*"))


def refuse(saved: Saved, key: str) -> None:
    """Fail, as an upload does whose key is no longer valid."""
    raise PermissionError("refused")


def test_no_log_shows_an_argument(runs: Runs) -> None:
    """It may be a key: neither the first lines, nor a failure, nor a resume with another one writes it."""
    config = runs.root / "keys.yaml"
    base = f"$BASE: {PROJECT}/tests/base.yaml\ncheckpoint: {{after_save: [{{type: '{HERE}:refuse', key: "
    config.write_text(f"{base}s3cret-1}}]}}\n")
    folder = runs.train("--config", str(config))
    config.write_text(f"{base}s3cret-2}}]}}\n")
    runs.train("--config", str(config), "--resume", str(folder), "--progress.epoch", "4")
    said = (folder / "train.log").read_text()
    assert f"checkpoint.after_save {HERE}:refuse failed with" in said
    assert "checkpoint.after_save has changed" in said
    assert "s3cret" not in said


def test_a_mistake_is_said_before_the_start(runs: Runs) -> None:
    """A function that does not exist, and an argument that it does not have."""
    with pytest.raises(ConfigError) as found:
        runs.train("--checkpoint.after_save", f"[to_the_moon, {{type: '{HERE}:copy', two: x}}]")
    for part in (
        "checkpoint.after_save[0]",
        "there is no after_save called to_the_moon",
        "checkpoint.after_save[1].two",
    ):
        assert part in str(found.value)
