"""`monitor.writers`: where curves and pictures go."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import ConfigError
from engine.conftest import PICTURES
from tests.conftest import Runs

HERE = "engine.monitor.test_writers"


def test_mistakes_in_the_list_of_writers(runs: Runs) -> None:
    """All at once, before anything starts."""
    with pytest.raises(ConfigError) as found:
        runs.train(
            "--monitor.writers",
            "[tensorbord, {type: tests.monitor.test_writers.Diary}, mlflow]",
        )
    said = str(found.value)
    for part in (
        "monitor.writers[0]", "did you mean tensorboard?", "monitor.writers[1].title",
        "monitor.writers[2]", "mlflow_writer.py", "needs mlflow, which is not installed",
    ):  # fmt: skip
        assert part in said, said


@pytest.mark.slow
def test_what_tensorboard_shows(runs: Runs) -> None:
    """Groups of curves, pictures in one of their own that comes last, and texts."""
    folder = runs.train(
        "--monitor.writers", "[tensorboard]", "--progress.max_steps", "6",
        "--progress.epoch_eval", "1", "--pictures.every", "4", *PICTURES, "--optim.groups", "[{match: head.*}]",
        "--metric.ConfusionMatrix", "{}", "--metric.MeanAveragePrecision", "{}",
    )  # fmt: skip
    board = EventAccumulator(str(folder / "event")).Reload()
    found = board.Tags()
    scalars = ["loss", "Accuracy", "ConfusionMatrix.balanced_accuracy", "ConfusionMatrix.macro_f1"]
    measured = {f"{split}/{name}" for split in ("Val", "best", "eval") for name in [*scalars, "MeanAveragePrecision"]}
    train = {"Train/loss", "Train/grad_norm", "Train/lr_head", "Train/lr_rest"}
    speed = {"speed/step_seconds", "speed/data_share", "speed/samples_per_second", "speed/memory_bytes"}
    assert set(found["scalars"]) == train | measured | speed
    assert set(found["images"]) == {"view/train", "view/val", "view/eval"}
    assert {f"run/{name}/text_summary" for name in ("config", "environment", "model")} <= set(found["tensors"])
    best = max(board.Scalars("best/loss"), key=lambda each: each.step)
    assert best.value == min(each.value for each in board.Scalars("Val/loss"))
    left = folder / "eval" / "epoch_000001"
    assert {"00.png", "07.png"} <= {path.name for path in left.iterdir()}


def test_a_resume_continues_the_curves(runs: Runs) -> None:
    folder = runs.train("--monitor.writers", "[tensorboard]", "--progress.max_steps", "2")
    runs.train("--monitor.writers", "[tensorboard]", "--progress.max_steps", "4", "--resume", "auto")
    points = EventAccumulator(str(folder / "event")).Reload().Scalars("Train/loss")
    # Files of one second are read in the order of their names, so the order of two quick runs is open.
    assert sorted(point.step for point in points) == [2, 4]
