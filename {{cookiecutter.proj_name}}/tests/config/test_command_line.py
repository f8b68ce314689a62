"""Both programs and what they leave behind, seen from where a user sits: files, the command line, the run folder."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from common.config import resolve
from common.settings import RunConfig
import evaluate
import train
from tests.conftest import CONFIG, PROJECT, Runs, metrics


def test_values_and_their_origins_are_printed(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config names file and line of every value, through two bases; nothing is started."""
    (tmp_path / "slow.yaml").write_text("optim:\n  lr: 1e-5\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"$BASE: ['{CONFIG}', slow.yaml]\nnum_workers: 1\n")
    assert runs.fail("--config", str(mine), "--model.width=6", "--print-config") == 0
    shown = capsys.readouterr().out
    places = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in shown.splitlines() if "  # " in line}
    assert places["lr: 1.0e-05"] == f"{tmp_path / 'slow.yaml'}:2"
    assert places["num_workers: 1"] == f"{mine}:2"
    assert places["width: 6"] == "command line: --model.width=6"
    assert places["epoch_save_checkpoint: 10"].startswith("tests/base.yaml:")
    assert not (tmp_path / "run").exists()
    printed = yaml.safe_load(shown)
    assert (printed["optim"]["lr"], printed["num_workers"], printed["model"]["width"]) == (1e-5, 1, 6)


def test_forms_of_values_on_the_command_line(runs: Runs) -> None:
    """With a space or `=`, lists with commas, switches, any way to write a number."""
    folder = runs.train(
        "--optim.lr=1.5E-3", "--optim.weight_decay", "+1e-2", "--optim.no_decay", "auto,*.bias",
        "--progress.train_metric", "--optim.lr_scheduler.args={}", "--progress.epoch", "1",
    )  # fmt: skip
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert (values["optim"]["lr"], values["optim"]["weight_decay"]) == (0.0015, 0.01)
    assert values["optim"]["no_decay"] == ["auto", "*.bias"]
    assert values["progress"]["train_metric"] is True
    assert metrics(folder, "train")[-1]["values"]["lr"] == 0.0015


def test_what_a_run_leaves_and_where(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any working directory; data are found below the project, relative paths start there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    relative = os.path.relpath(runs.root, PROJECT)
    words = ["--config", str(CONFIG), "--dir.runs_dir", relative, "--dir.data_dir", "data"]
    folder = runs.train(
        *words, "--progress.epoch", "1", "--progress.epoch_eval", "1", "--monitor.writers", "[tensorboard]"
    )
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml", "run.json", "git.diff", "train.log", "metrics.jsonl", "status.json",
        "checkpoints", "eval",
    }  # fmt: skip
    assert list(folder.glob("event/events.*"))
    assert {path.name for path in (folder / "checkpoints").glob("*.pt")} >= {"latest.pt", "best.pt"}
    assert list(elsewhere.iterdir()) == []


def test_the_record_of_a_run(runs: Runs) -> None:
    """The resolved config, command, seed, versions, code; a resume adds to it and changes nothing."""
    words = ["--dist.random_seed", "7", "--batch_size", "40"]
    folder = runs.train(*words, "--progress.epoch", "1")
    resolved = resolve(RunConfig, [CONFIG], runs.words(*words, "--progress.epoch", "1")[2:])
    first = (folder / "config.yaml").read_bytes()
    values = yaml.safe_load(first)  # with your own settings
    assert {key: values[key] for key in resolved.values} == resolved.values
    runs.train(*words, "--resume", "auto")
    assert (folder / "config.yaml").read_bytes() == first
    assert yaml.safe_load((folder / "config.resume-1.yaml").read_text())["progress"]["epoch"] == 2
    attempts = json.loads((folder / "run.json").read_text())["attempts"]
    assert [attempt["config"] for attempt in attempts] == ["config.yaml", "config.resume-1.yaml"]
    assert attempts[0]["packages"]["torch"] == torch.__version__
    assert "commit" in attempts[0]["git"]
    assert attempts[0]["seed"] == 7
    command = shlex.split(attempts[0]["command"])
    assert [Path(command[1]).name, *command[2:4]] == ["train.py", "--config", str(CONFIG)]


def test_a_split_that_is_not_there(runs: Runs) -> None:
    """Training continues without it; asked for by name, it is an error that says so, never another split."""
    folder = runs.train("--dataset.val", "null", "--progress.epoch", "1", "--best.metric", "loss")
    assert metrics(folder, "val") == []
    with pytest.raises(ValueError, match=r"dataset\.val is null"):
        evaluate.main(["--model_pt", str(folder / "checkpoints" / "latest.pt"), "--split", "val"])
    with pytest.raises(ValueError, match=r"'train', 'val'"):
        evaluate.main(["--model_pt", str(folder / "checkpoints" / "latest.pt"), "--split", "tset"])


def test_help_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of both programs is listed with its meaning, without a config."""
    for program, keys in ((train, []), (evaluate, ["--model_pt", "--split"])):
        with pytest.raises(SystemExit) as stop:
            program.main(["--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        resolved = resolve(RunConfig, [CONFIG])
        open_ = ("task", "model", "loss", "metric", "dataset", "loader.order", "optim.lr_scheduler.args")
        closed = [key for key in resolved.origins if not key.startswith(open_) and "[" not in key]
        assert [key for key in closed if f"  --{key}  " not in shown and f"\n{key}: " not in shown] == []
        assert [key for key in keys if f"  {key}  " not in shown] == []
