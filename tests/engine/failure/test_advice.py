"""Mistakes in one's own model, dataset, loss or metric: the message names the cause, the place and a remedy."""

from pathlib import Path

import pytest
import torch
from torch import nn

from common.failure.program import report_errors
import evaluate
from tests.conftest import CONFIG, PROJECT, Runs


@pytest.mark.slow
def test_checkpoints_that_are_elsewhere_or_are_none(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's folder means its best checkpoint; a misspelt one; a pickled model; a finished run."""

    def evaluated(path: Path) -> str:
        with pytest.raises(SystemExit) as ended, report_errors():
            evaluate.main(["--model_pt", str(path), "--config", str(CONFIG)])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    first = runs.train()
    assert evaluate.main(["--model_pt", str(first)]) == 0
    assert f"eval of {first / 'checkpoints' / 'best.pt'}" in capsys.readouterr().err
    runs.train("--resume", "auto")
    assert (
        "this run finished already, at epoch 2, step 10; to train longer, raise progress.epoch"
        in capsys.readouterr().err
    )
    assert (
        runs.train("--resume", "auto", "--progress.epoch", "3").joinpath("train.log").read_text().count("finished") == 4
    )

    missing = first / "checkpoints" / "bets.pt"
    said = f"error: there is no checkpoint {missing}; in {missing.parent}: best.pt, latest.pt"
    assert evaluated(missing).startswith(said)

    pickled = runs.root / "model.pt"
    torch.save(nn.Linear(2, 2), pickled)
    text = evaluated(pickled)
    assert "it holds Python objects" in text and "torch.save(model.state_dict(), path)" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("text", "line", "cause"),
    [
        ("optim:\n  lr: 0.1\n   decay: 0.2\n", 3, "mapping values are not allowed here"),
        ("optim:\n  lr: 0.1\n\tema: 0.2\n", 3, "cannot start any token"),
        ("name: a: b\n", 1, "mapping values are not allowed here"),
        ("optim: {lr: 0.1\nname: b\n", 2, "expected ',' or '}'"),
        ("name: @a\n", 1, "cannot start any token"),
        ('name: "a\nworker: 1\n', 3, "found unexpected end of stream"),
    ],
)  # fmt: skip
def test_yaml_that_cannot_be_read(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: int, cause: str
) -> None:
    """The place and the cause."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended, report_errors():
        runs.train("--config", str(path))
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"mine.yaml:{line}" in shown and cause in shown, shown


def test_a_config_that_is_elsewhere(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started in another folder, or with the folder misspelt: its whole path, and the nearest file."""
    full = PROJECT / "configs" / "debug.yaml"
    for folder, given, near in [(PROJECT, "config/debgu.yaml", "configs/debug.yaml"), (tmp_path, "debug.yaml", full)]:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit), report_errors():
            runs.train("--config", given)
        text = capsys.readouterr().err
        assert f"{folder / given} is not a file" in text
        assert f"did you mean {near}?" in text
