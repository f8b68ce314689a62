"""What a run tells: its lines, and everything together in a short run."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.base.files import Appender
from common.base.text import number
from common.distributed import Rank
from common.monitor.line import evaluation_line, position, rates_text, train_line
from common.monitor.log import setup_log
from common.monitor.meter import Reading
from common.monitor.monitor import Monitor, MonitorConfig
from common.monitor.result import SetResult, SplitResult
from common.progress import Position
from common.run.folder import OpenRun, open_run
from common.run.paths import DirConfig, RunPaths
from common.run.record import describe_start
from common.run.status import read_status

pytestmark = pytest.mark.usefixtures("restored_log")

SPEED = ("step_seconds", "data_share", "samples_per_second", "memory_bytes")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    with closing(open_digits(tmp_path)) as run:
        yield run


def open_digits(project: Path, *, resume: bool = False) -> OpenRun:
    folder = RunPaths.for_run(DirConfig(), "digits", project)
    return open_run(folder, {}, *describe_start(project, ["train.py"], 0, Rank()), resume=resume)


def here() -> str:
    """Path and line of the caller."""
    return f"{__file__}:{sys._getframe(1).f_lineno}"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "event"))
    accumulator.Reload()
    return accumulator


def losses(total: float, **parts: float) -> dict[str, torch.Tensor]:
    """As `LossFactory` gives them: part of a graph."""
    made = {name: torch.tensor(value, requires_grad=True) * 1 for name, value in parts.items()}
    return {"loss": torch.tensor(total, requires_grad=True) * 1, **made}


def test_the_training_line():
    """Everything in one line, in columns that do not move."""
    first = train_line(
        position(Position(step=7, epoch=0, sample=448, epoch_size=1200), 570, 30),
        rates={"lr_a": 1e-3, "lr_b": 1e-4},
        losses=Reading({"loss": 12.3456789, "ce": 2.30258, "l2": 1e-5}, {"loss": 12.0, "ce": 2.4, "l2": 1.28e-5}),
        others={"grad_norm": 1.2},
        speed=dict(zip(SPEED, (0.0031, 0.12, 20645.2, 430_000_000), strict=True)),
        eta=82.4,
        skipped=(0, 0),
    )
    second = train_line(
        position(Position(step=120, epoch=6, sample=0, epoch_size=1200), 570, 30),
        rates={"lr_a": 1e-3, "lr_b": 1e-4},
        losses=Reading({"loss": 0.0042, "ce": 0.5, "l2": 1e-5}, {"loss": 0.125, "ce": 0.5, "l2": 1e-5}),
        others={"grad_norm": 0.034567},
        speed=dict(zip(SPEED, (0.0117, 0.0, 987.0, 430_000_000), strict=True)),
        eta=5.0,
        skipped=(0, 0),
    )
    assert first == (
        "epoch  1/30 step   7/570 | loss 12.3457 (12.0000)  ce 2.30258 (2.40000)  l2 1.0e-05 (1.3e-05) | "
        "lr_a 1.00e-03  lr_b 1.00e-04 | grad_norm 1.20000 | ETA 0:01:22 | "
        "   3.1 ms/step data  12%  20645/s | mem 410 MB"
    )
    assert second == (
        "epoch  6/30 step 120/570 | loss 0.00420 (0.12500)  ce 0.50000 (0.50000)  l2 1.0e-05 (1.0e-05) | "
        "lr_a 1.00e-03  lr_b 1.00e-04 | grad_norm 0.03457 | ETA 0:00:05 | "
        "  11.7 ms/step data   0%    987/s | mem 410 MB"
    )


def test_the_line_leaves_out_what_is_not_known():
    """One loss is not said twice; without totals there is no estimate."""
    line = train_line(
        position(Position(step=7), None, None),
        rates={"lr": 0.1},
        losses=Reading({"loss": 0.5, "ce": 0.5}, {"loss": 0.5, "ce": 0.5}),
        others={},
        speed=dict(zip(SPEED, (1.5, 0.5, 10.0, 3 * 2**30), strict=True)),
        eta=None,
        skipped=(0, 0),
    )
    assert line == (
        "epoch 1 step 7 | loss 0.50000 (0.50000) | lr 1.00e-01 | 1500.0 ms/step data  50%     10/s | mem 3072 MB"
    )


def test_numbers_for_people():
    """Digits whatever the size; every group's rate."""
    values = [0.0042, 1234.56, 3e-7, 123456.7, 0.99999999, 0.0, math.nan, -2.5]
    expected = ["0.00420", "1234.56", "3.0e-07", "1.2e+05", "1.00000", "0.00000", "    nan", "-2.50000"]
    assert [number(value) for value in values] == expected
    assert rates_text({"lr": 1e-3}) == "lr 1.00e-03"
    assert rates_text({"lr_rest": 1e-3, "lr_head": 1e-3}) == "lr_rest 1.00e-03  lr_head 1.00e-03"
    assert rates_text({f"lr_{n}": 0.1 / n for n in range(1, 7)}) == "lr 1.67e-02..1.00e-01 (6 groups)"


def test_the_evaluation_line():
    """Which data, where, what, over how many samples."""
    values = {"loss": 0.0042, "accuracy": 0.97}
    line = evaluation_line("val", "epoch  3/30 step  57/570", values, 360, best=True)
    assert line == "val    3/30 step  57/570 | loss 0.00420  accuracy 0.97000 | 360 samples | best so far"


def test_lines_name_the_trainer_not_the_monitor(run, tmp_path):
    """Also where the monitor makes the line."""
    setup_log(file=Appender(tmp_path / "log"))
    monitor = Monitor(MonitorConfig(writers=[]), Rank(), run, resume_step=None, values={})
    at, optimizer = Position(step=1, sample=1), torch.optim.SGD([torch.zeros(1)], lr=0.5)
    monitor.train(at, optimizer, torch.tensor(1.0), {}, (0, 0))
    monitor.evaluation("val", at, SplitResult({"": SetResult({}, 1)}))
    monitor.end("finished", at, "")
    line = int(here().rpartition(":")[2])
    places = [text.split()[3] for text in (tmp_path / "log").read_text().splitlines()]
    assert places == [f"{__name__}:{number}" for number in range(line - 3, line)]


def test_a_bar_only_on_a_terminal(run):
    """Not in a file; a test's output is a file."""
    monitor = Monitor(MonitorConfig(writers=[]), Rank(), run, resume_step=None, values={})
    with monitor.training(Position(), 10, None):
        monitor.begin()
        assert monitor.bar.disable


def short_run(project: Path, *, resume_step: int | None = None, last: int = 3, rank: Rank | None = None) -> list[str]:
    """Three steps as the trainer takes them. Returns what was logged."""
    lines: list[str] = []
    logger.remove()
    logger.add(lines.append, format="{message}")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    with closing(open_digits(project, resume=resume_step is not None)) as run:
        opened = run if rank is None else None
        monitor = Monitor(MonitorConfig(), rank or Rank(), opened, resume_step=resume_step, values={})
        begin = resume_step or 0
        with monitor.training(Position(step=begin), total_steps=9, epochs=3):
            monitor.begin()
            for step in range(begin + 1, last + 1):
                at = Position(step=step, epoch=0, sample=step, epoch_size=9)
                monitor.clock.batch_ready()
                monitor.meter.add(at, losses(1.0 / step, ce=1.0 / step), 4)
                monitor.step_done(at, 4)
                monitor.train(at, optimizer, torch.tensor(2.0), {}, (0, 0))
        monitor.evaluation("val", at, SplitResult({"": SetResult({"loss": 0.5}, 7)}), best=True)
        monitor.recorder.record("checkpoint", step=at.step, epoch=1, best=False, numbered=False, mode="min")
        monitor.end("finished", at, "3 epochs")
    return lines


def test_three_steps_leave_their_marks(tmp_path):
    """Lines, metrics, TensorBoard and the end of a run."""
    lines = short_run(tmp_path)
    root = tmp_path / "experiments/digits"
    assert lines[2].startswith("epoch 1/3 step 3/9 | loss 0.33333 (0.61111) | lr 5.00e-01 | grad_norm 2.00000 | ")
    assert lines[3].startswith("val ")
    assert lines[-1].startswith("finished at epoch 1, step 3: 3 epochs")
    entries = lines_of(root / "metrics.jsonl")
    assert [entry["event"] for entry in entries] == ["run", *["train", "speed"] * 3, "val", "checkpoint", "end"]
    assert entries[5]["values"] == {
        "loss": float(np.float32(1 / 3)),
        "ce": float(np.float32(1 / 3)),
        "grad_norm": 2.0,
        "lr": 0.5,
    }
    assert [point.step for point in events(root).Scalars("Train/loss")] == [1, 2, 3]
    status = read_status(RunPaths(root))
    assert status is not None
    assert (status["state"], status["step"], status["reason"]) == ("finished", 3, "3 epochs")


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    """One curve, whatever was lost between the checkpoint and the kill."""
    short_run(tmp_path, last=5)
    short_run(tmp_path, resume_step=3, last=6)
    entries = lines_of(tmp_path / "experiments/digits/metrics.jsonl")
    assert [entry["step"] for entry in entries if entry["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    heads = [entry for entry in entries if entry["event"] == "run"]
    assert [(head["attempt"], head["resume_step"]) for head in heads] == [(1, None), (2, 3)]
    assert heads[0]["run"] == heads[1]["run"]


def test_other_processes_write_nothing(tmp_path):
    """The same calls, null parts."""
    short_run(tmp_path, rank=Rank(rank=1))
    names = {path.name for path in (tmp_path / "experiments/digits").iterdir()}
    assert "event" not in names
    assert not names & {"metrics.jsonl", "progress", "status.json"}
