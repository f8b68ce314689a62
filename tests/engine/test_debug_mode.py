"""What --debug lays over a config: one process that does one thing at a time."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from loguru import logger

from common import distributed
from common.base.text import flat
from common.config import resolve
from common.distributed import DistConfig
import train
from parts.gradients.around import log_gradients
from tests.conftest import CONFIG, PROJECT, Runs, metrics
from custom.config import Config

BUSY = "gpu_ids: [0, 1]\ndist: {processes: 2}\nnum_workers: 2\ncheckpoint: {background: true}\n"


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """A config for two processes, with workers and background saves."""
    path = tmp_path / "busy.yaml"
    path.write_text(f"$BASE: {CONFIG}\n{BUSY}")
    return path


def test_one_process_and_nothing_beside_it(runs: Runs, busy: Path) -> None:
    """One process, on the CPU, no workers, no background saves, whatever the config says."""
    assert train.main(["--config", str(busy), "--debug", "--dir.runs_dir", str(runs.root)]) == 0
    folder = runs.root / "debug"
    assert json.loads((folder / "run.json").read_text())["attempts"][0]["world_size"] == 1
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert (values["num_workers"], values["checkpoint"]["background"], values["gpu_ids"]) == (0, False, -1)


def test_the_command_line_wins(monkeypatch: pytest.MonkeyPatch, busy: Path) -> None:
    """Who asks for two processes in the same breath gets them."""
    asked: list[Any] = []

    def spawn(gpu_ids: Any, config: DistConfig, argv: list[str]) -> int:
        asked.append((gpu_ids, config.processes))
        return 7

    monkeypatch.setattr(distributed, "spawn", spawn)
    assert train.main(["--config", str(busy), "--debug", "--dist.processes", "2"]) == 7
    assert train.main(["--config", str(busy), "--debug", "--gpu_ids", "0,1"]) == 7
    assert asked == [(-1, 2), ([0, 1], None)]


SHIPPED = sorted(
    path.relative_to(PROJECT)
    for pattern in ("configs/*.yaml", "examples/*/*.yaml")
    for path in PROJECT.glob(pattern)
    if path.name != "eval.yaml"  # for evaluate.py
)
OFTEN = ("default.yaml", "ops.yaml", "distillation", "language_model", "stages", "stream")
STEPS = ", args: {lr_steps: [30, 60]}"
SCHEDULES = ["cosine", f"multistep{STEPS}", "onecycle", "plateau", "constant"]


def debugged(runs: Runs, config: Path, *words: str) -> Path:
    small = ["--debug.max_samples", "48", "--monitor.writers", "[]"]
    assert train.main(["--config", str(config), "--debug", "--dir.runs_dir", str(runs.root), *small, *words]) == 0
    return runs.root / "debug"


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [pytest.param(path, marks=() if path.parts[1] in OFTEN else pytest.mark.full) for path in SHIPPED],
    ids=str,
)
def test_every_shipped_config(runs: Runs, config: Path) -> None:
    """D13: --debug runs to its end whatever a config sets."""
    values, words = resolve(Config, [PROJECT / config]).values, []
    if start := values["init_from"]["path"]:  # of a run that comes first
        weights, short = runs.root / "first", ["--progress.max_steps", "1", "--monitor.writers", "[]"]
        if (base := PROJECT / f"examples/{Path(start).parents[1].name}/config.yaml").is_file():
            assert train.main(["--config", str(base), "--dir.runs_dir", str(runs.root), "--name", "first", *short]) == 0
        else:
            runs.train("--model", "{type: ConvModel}", *short, name="first")
        keys = [key for key, value in flat(values).items() if value == start]
        words = [f"--{key}={weights / 'checkpoints' / 'latest.pt'}" for key in keys]
    folder = debugged(runs, PROJECT / config, *words)
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lengths_made_for_a_long_run(runs: Runs, tmp_path: Path, schedule: str) -> None:
    """D13: a warm-up of 20 epochs, large steps, an early stop, intervals in epochs and steps."""
    path = tmp_path / "long.yaml"
    path.write_text(
        f"$BASE: {CONFIG}\nbatch_size: 512\nloader: {{drop_last: true}}\ndist: {{distributed_backend: nccl}}\n"
        f"optim: {{accumulate: 4, lr_scheduler: {{type: {schedule}, warmup: 20}}}}\n"
        "early_stop: {patience: 1}\n"
        "progress: {epoch: 100, max_steps: 100000, epoch_val: 0.1epoch, epoch_eval: 1000step, log_every: 3epoch}\n"
    )
    folder = debugged(runs, path)
    log = (folder / "train.log").read_text()
    is_shortened = re.search(r"the warm-up of \d+ steps is shortened, since this run has only 2", log)
    assert bool(is_shortened) == (schedule in ("cosine", "onecycle"))
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_a_warm_up_that_does_not_fit_is_refused_in_a_real_run(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless max_steps cuts the run short."""
    words = ["--optim.lr_scheduler", "{type: cosine, warmup: 20step}"]
    assert runs.fail(*words, "--progress.epoch", "1") == 2
    assert "is reached at step 5, in a warm-up of 20" in capsys.readouterr().err
    words += ["--progress.max_steps", "5"]
    log = (runs.train(*words, "--progress.log_every", "1") / "train.log").read_text()
    assert "the warm-up of 20 steps is shortened, since this run has only 5" in log
    assert [row["values"]["lr"] * 1e3 for row in metrics(runs.root / "run", "train")] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1]
    )
    assert runs.fail(*words, "--debug.debug_mode", "true", "--optim.lr_scheduler.tmax", "10step") == 2


def test_sparse_gradients_are_shown() -> None:
    """Those of the rows that were used."""
    model = torch.nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 1])).sum().backward()
    messages: list[str] = []
    number = logger.add(messages.append, format="{message}")
    log_gradients(model, every=True)
    logger.remove(number)
    assert "largest |gradient| 2.000e+00 in weight" in "".join(messages)
