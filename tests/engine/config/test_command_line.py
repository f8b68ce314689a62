"""Both programs and what they leave behind, seen from where a user sits: files, the command line, the run folder."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from common.config import ConfigError
from common.config.registry import COLLATE_REGISTRY, MODEL_REGISTRY, file_of
import train
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load, metrics, run, same
from tests.small import stack
import custom

YOURS = Path(custom.__path__[0]).name


def test_a_config_cannot_run_code(runs: Runs, tmp_path: Path) -> None:
    """A tag that would make Python do something is refused with its line."""
    canary = tmp_path / "canary"
    (tmp_path / "evil.yaml").write_text(f"name: !!python/object/apply:os.mkdir ['{canary}']\n")
    with pytest.raises(ValueError, match=r"evil\.yaml:1\)\n +.* the tag .*python/object/apply"):
        runs.fail("--config", str(tmp_path / "evil.yaml"))
    assert not canary.exists()


def test_a_list_shows_types_without_their_rules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--list", "schedules"])
    shown = capsys.readouterr().out
    assert "power: float = 0.9" in shown and "FieldInfo" not in shown


def test_the_log_begins_with_what_happens_when(runs: Runs) -> None:
    """Where it runs, which code was chosen, by file and line, then every period, in the loop's order."""
    folder = runs.train("--progress.epoch_val", "0.5epoch", "--progress.epoch", "1")
    log = (folder / "train.log").read_text()
    assert f"  rank 0 of 1 on cpu, seed 42, run folder {folder}\n" in log
    assert f"model ConvModel {file_of(MODEL_REGISTRY.get('ConvModel'))}\n" in log
    table = log.partition("5 steps per epoch; intervals:\n")[2].splitlines()[:5]
    assert [line.strip() for line in table] == [
        "log line, scalars  every 2 steps",
        "validation         every 0.5 epochs",
        "evaluation         never",
        "latest.pt          every 1 epoch",
        "step_*.pt          every 10 epochs",
    ]


@pytest.mark.slow
def test_job_script_repeats_the_run(runs: Runs, tmp_path: Path) -> None:
    """Sh job.sh, from another folder, ends with the same weights to the last bit."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = runs.train("--dist.random_seed", "7", "--optim.lr_scheduler.type", "cosine")
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = run(["sh", str(folder / "job.sh")], cwd=elsewhere, env=clean)
    assert done.returncode == 0, done.stderr
    first, again = load(folder), load(runs.root / "run_replicate")
    for part in ("model", "optimizer", "best", "position"):
        assert same(first[part], again[part]), part
    assert list(elsewhere.iterdir()) == []


def test_auto_names_no_config(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resume auto` without --config does not read whatever config.yaml lies in the current folder."""
    (tmp_path / "config.yaml").write_text(f"$BASE: {PROJECT}/configs/default.yaml\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--config[\s\S]*needs a file; train.py --config"):
        train.main(["--resume", "auto", "--dir.runs_dir", str(tmp_path), "--progress.max_steps", "1"])
    assert not list(tmp_path.glob("*/"))


def test_the_floor_of_a_schedule_is_below_the_rate(runs: Runs) -> None:
    """A floor is a share of the rate, so that no rate is ever raised to it; the old name is refused."""
    folder = runs.train(
        "--optim.lr", "1e-5", "--optim.lr_scheduler", "{type: cosine, min_factor: 0.1}", "--progress.log_every", "1"
    )
    rates = [entry["values"]["lr"] for entry in metrics(folder, "train")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1e-5
    assert rates[-1] >= 1e-6
    with pytest.raises(ValueError, match=r"optim\.lr_scheduler\.ema_min .*\n +unknown key"):
        runs.fail("--optim.lr_scheduler.ema_min", "0.1")


def test_a_registered_collate_function(runs: Runs) -> None:
    """By name, from the config."""
    COLLATE_REGISTRY.register("stack_for_a_test")(stack)
    runs.train("--loader.collate", "stack_for_a_test", "--progress.epoch", "1")


@pytest.mark.slow
def test_a_key_of_ones_own(tmp_path: Path) -> None:
    """A section with a field in the project's config is in YAML, on the command line, in --help and checked."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("experiments", "tests", "__pycache__", ".*cache*"))
    config = project / YOURS / "config.py"
    text = config.read_text()
    section = (
        "@section\nclass MixConfig:\n"
        '    """Blending of pairs of images."""\n\n'
        '    alpha: Annotated[float, Field(ge=0)] = 0.0\n    """how strongly; 0: off"""\n\n\n'
    )
    head = "from dataclasses import field\n"
    text = text.replace(head, f"{head}from typing import Annotated\n\nfrom pydantic import Field\n", 1)
    text = text.replace("@section\nclass Config(RunConfig):", section + "@section\nclass Config(RunConfig):", 1)
    last = "    dataset: Data = field(default_factory=Data)\n"
    assert last in text and section in text
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
