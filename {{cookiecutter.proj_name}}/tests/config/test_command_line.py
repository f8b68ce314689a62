"""Both programs and what they leave behind, seen from where a user sits: files, the command line, the run folder."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from common.config import ConfigError, resolve
from common.config.registry import COLLATE_REGISTRY, MODEL_REGISTRY
import evaluate
import train
from tests.conftest import CONFIG, ENVIRONMENT, PROJECT, Runs, load, metrics, run, same
from tests.parts import stack
import custom
from custom.config import Config

YOURS = Path(custom.__path__[0]).name


def test_values_and_their_origins_are_printed(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-17, QQ-05, CT-02: --print-config names file and line of every value, through two bases; nothing is started."""
    (tmp_path / "slow.yaml").write_text("optim:\n  lr: 1e-5\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"$BASE: ['{CONFIG}', slow.yaml]\nworker: 1\n")
    assert runs.fail("--config", str(mine), "--model.width=6", "--print-config") == 0
    shown = capsys.readouterr().out
    places = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in shown.splitlines() if "  # " in line}
    assert places["lr: 1.0e-05"] == f"{tmp_path / 'slow.yaml'}:2"
    assert places["worker: 1"] == f"{mine}:2"
    assert places["width: 6"] == "command line: --model.width=6"
    assert places["patience: 10"].startswith("tests/base.yaml:")
    assert not (tmp_path / "run").exists()
    (tmp_path / "printed.yaml").write_text(shown)
    printed = resolve(Config, [tmp_path / "printed.yaml"]).config
    assert (printed.optim.lr, printed.num_workers, printed.model["width"]) == (1e-5, 1, 6)


def test_forms_of_values_on_the_command_line(runs: Runs) -> None:
    """CT-03, CT-04, QQ-03, D-21, D-23: with a space or `=`, lists with commas, switches, any way to write a number."""
    folder = runs.train(
        "--optim.lr=1.5E-3", "--optim.weight_decay", "+1e-2", "--optim.lr_scheduler.lr_steps", "1,2",
        "--progress.local_progress", "--optim.lr_scheduler.args={}", "--progress.epoch", "1",
    )  # fmt: skip
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert (values["optim"]["lr"], values["optim"]["weight_decay"]) == (0.0015, 0.01)
    assert values["optim"]["lr_scheduler"]["lr_steps"] == [1, 2]
    assert values["progress"]["local_progress"] is True
    assert metrics(folder, "train")[-1]["values"]["lr"] == 0.0015


def test_a_config_cannot_run_code(runs: Runs, tmp_path: Path) -> None:
    """D-26: a tag that would make Python do something is refused with its line."""
    canary = tmp_path / "canary"
    (tmp_path / "evil.yaml").write_text(f"name: !!python/object/apply:os.mkdir ['{canary}']\n")
    with pytest.raises(ValueError, match=r"evil\.yaml:1\)\n +.* the tag .*python/object/apply"):
        runs.fail("--config", str(tmp_path / "evil.yaml"))
    assert not canary.exists()


def test_the_log_begins_with_what_happens_when(runs: Runs) -> None:
    """R-27, R-16: where it runs, which code was chosen, by file and line, then every period, in the loop's order."""
    folder = runs.train("--progress.epoch_val", "0.5epoch", "--progress.epoch", "1")
    log = (folder / "train.log").read_text()
    assert f"  rank 0 of 1 on cpu, seed 42, run folder {folder}\n" in log
    assert f"model ConvModel {MODEL_REGISTRY.where('ConvModel')} (" in log
    table = log.partition("5 steps per epoch; intervals:\n")[2].splitlines()[:6]
    assert [line.strip() for line in table] == [
        "log line, scalars  every 2 steps",
        "training pictures  every 100 steps",
        "validation         every 0.5 epochs",
        "evaluation         never",
        "latest.pt          every epoch",
        "step_*.pt          every 10 epochs",
    ]


def test_what_a_run_leaves_and_where(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CT-08, CT-11, R-05: from any working directory; data are found below the project, relative paths start there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    relative = os.path.relpath(runs.root, PROJECT)
    words = ["--config", str(CONFIG), "--dir.expr_dir", relative, "--dir.data_dir", "data"]
    folder = runs.train(
        *words, "--progress.epoch", "1", "--progress.epoch_eval", "1", "--monitor.writers", "[tensorboard]"
    )
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml", "run.json", "git.diff", "job.sh", "train.log", "metrics.jsonl", "status.json",
        "checkpoints", "eval",
    }  # fmt: skip
    assert list(folder.glob("event/events.*"))
    assert {path.name for path in (folder / "checkpoints").glob("*.pt")} >= {"latest.pt", "best.pt"}
    assert list(elsewhere.iterdir()) == []


def test_the_record_of_a_run(runs: Runs) -> None:
    """CT-09, D-58: the resolved config, command, seed, versions, code; a resume adds to it and changes nothing."""
    words = ["--dist.random_seed", "null", "--batch_size", "40"]
    folder = runs.train(*words, "--progress.epoch", "1")
    resolved = resolve(Config, [CONFIG], runs.words(*words, "--progress.epoch", "1")[2:])
    first, script = (folder / "config.yaml").read_bytes(), (folder / "job.sh").read_bytes()
    assert yaml.safe_load(first) == resolved.values  # the seed that was drawn is no part of it
    runs.train(*words, "--resume", "auto")
    assert ((folder / "config.yaml").read_bytes(), (folder / "job.sh").read_bytes()) == (first, script)
    assert yaml.safe_load((folder / "config.resume-1.yaml").read_text())["progress"]["epoch"] == 2
    attempts = json.loads((folder / "run.json").read_text())["attempts"]
    assert [attempt["config"] for attempt in attempts] == ["config.yaml", "config.resume-1.yaml"]
    assert attempts[0]["versions"]["torch"] == torch.__version__
    assert "commit" in attempts[0]["git"]
    assert isinstance(attempts[0]["seed"], int)
    command = shlex.split(attempts[0]["command"])
    assert [Path(command[1]).name, *command[2:4]] == ["train.py", "--config", str(CONFIG)]


@pytest.mark.slow
def test_job_script_repeats_the_run(runs: Runs, tmp_path: Path) -> None:
    """R-48, CT-10, D-31: sh job.sh, from another folder, ends with the same weights to the last bit."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = runs.train("--dist.random_seed", "null", "--optim.lr_scheduler.type", "cosine")
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = run(["sh", str(folder / "job.sh")], cwd=elsewhere, env=clean)
    assert done.returncode == 0, done.stderr
    first, again = load(folder), load(runs.root / "run_replicate")
    for part in ("model", "optimizer", "best", "position"):
        assert same(first[part], again[part]), part
    assert list(elsewhere.iterdir()) == []


def test_auto_names_no_config(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-47: `--resume auto` without --config does not read whatever config.yaml lies in the current folder."""
    (tmp_path / "config.yaml").write_text(f"$BASE: {PROJECT}/configs/default.yaml\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--config[\s\S]*needs a file; train.py --config"):
        train.main(["--resume", "auto", "--dir.expr_dir", str(tmp_path), "--progress.max_steps", "1"])
    assert not list(tmp_path.glob("*/"))


def test_a_split_that_is_not_there(runs: Runs) -> None:
    """D-61: training goes on without it; asked for by name, it is an error that says so, never another split."""
    folder = runs.train("--dataset.val", "null", "--progress.epoch", "1", "--best.metric", "loss")
    assert metrics(folder, "val") == []
    with pytest.raises(ValueError, match=r"dataset\.val is null"):
        evaluate.main(["--model_pt", str(folder / "checkpoints" / "latest.pt"), "--split", "val"])
    with pytest.raises(ValueError, match=r"'train', 'val'"):
        evaluate.main(["--model_pt", str(folder / "checkpoints" / "latest.pt"), "--split", "tset"])


def test_the_floor_of_a_schedule_is_below_the_rate(runs: Runs) -> None:
    """D-16: a floor is a share of the rate, so that no rate is ever raised to it; the old name is refused."""
    folder = runs.train(
        "--optim.lr", "1e-5", "--optim.lr_scheduler", "{type: cosine, min_factor: 0.1}", "--progress.iter_loss", "1"
    )
    rates = [entry["values"]["lr"] for entry in metrics(folder, "train")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1e-5
    assert rates[-1] >= 1e-6
    with pytest.raises(ValueError, match=r"optim\.lr_scheduler\.ema_min .*\n +unknown key"):
        runs.fail("--optim.lr_scheduler.ema_min", "0.1")


def test_a_registered_collate_function(runs: Runs) -> None:
    """R-39: by name, from the config."""
    COLLATE_REGISTRY.register("stack_for_a_test")(stack)
    runs.train("--loader.collate", "stack_for_a_test", "--progress.epoch", "1")


@pytest.mark.slow
def test_a_key_of_ones_own(tmp_path: Path) -> None:
    """QQ-02: a section with a field in the project's config is in YAML, on the command line, in --help and checked."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("experiments", "tests", "__pycache__", ".*cache*"))
    config = project / YOURS / "config.py"
    text = config.read_text()
    section = (
        "@section\nclass MixConfig:\n"
        '    """Blending of pairs of images."""\n\n'
        '    alpha: Annotated[float, Field(ge=0, description="how strongly; 0: off")] = 0.0\n\n\n'
    )
    text = text.replace("@section\nclass Config(EngineConfig):", section + "@section\nclass Config:", 1)
    last = "    monitor: MonitorConfig = field(default_factory=MonitorConfig)\n"
    assert last in text
    config.write_text(text.replace(last, f"{last}    mix: MixConfig = field(default_factory=MixConfig)\n"))
    (project / "mine.yaml").write_text("$BASE: configs/default.yaml\nmix: {alpha: 0.5}\n")

    def said(*words: str) -> str:
        environment = {**ENVIRONMENT, "PYTHONPATH": ""}
        done = run([sys.executable, "train.py", *words], cwd=project, env=environment)
        return done.stdout + done.stderr

    assert re.search(r"  --mix.alpha  0.0 +# how strongly; 0: off\n", said("--help"))
    assert "alpha: 0.5" in said("--config", "mine.yaml", "--print-config")
    refused = said("--config", "mine.yaml", "--mix.alpha", "-1", "--mix.alhpa", "1")
    assert "2 problems" in refused
    assert "did you mean mix.alpha?" in refused or "did you mean alpha?" in refused


def test_help_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """R-09, QQ-02: every key of both programs is listed with its meaning, without a config."""
    for program, keys in ((train, []), (evaluate, ["--model_pt", "--split"])):
        with pytest.raises(SystemExit) as stop:
            program.main(["--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        resolved = resolve(Config, [CONFIG])
        open_ = ("task", "model", "loss", "metric", "dataset", "loader.order", "optim.lr_scheduler.args")
        closed = [key for key in resolved.origins if not key.startswith(open_) and "[" not in key]
        assert [key for key in closed if f"  --{key}  " not in shown and f"\n{key}: " not in shown] == []
        assert [key for key in keys if f"  {key}  " not in shown] == []
