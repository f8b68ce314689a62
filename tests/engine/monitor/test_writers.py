"""`monitor.writers`: where curves and pictures go."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import ConfigError
from tests.conftest import Runs

HERE = "engine.monitor.test_writers"


def test_mistakes_in_the_list_of_writers(runs: Runs) -> None:
    """All at once, before anything starts."""
    with pytest.raises(ConfigError) as found:
        runs.train(
            "--monitor.writers",
            "[tensorbord, {type: wandb, tag: x}, {type: tests.monitor.test_writers.Diary}, mlflow]",
        )
    said = str(found.value)
    for part in (
        "monitor.writers[0]", "did you mean tensorboard?", "monitor.writers[1].tag", "did you mean tags?",
        "monitor.writers[2].title", "needs the package mlflow, which is not installed; pip install mlflow",
    ):  # fmt: skip
        assert part in said, said
    with pytest.raises(ConfigError, match=r"name it in monitor.writers: \[tensorboard\]"):
        runs.train("--monitor.tensorboard", "true")


def test_what_tensorboard_shows(runs: Runs) -> None:
    """Groups of curves, pictures in one of their own that comes last, and texts."""
    folder = runs.train(
        "--monitor.writers", "[tensorboard]", "--progress.max_steps", "6",
        "--progress.epoch_eval", "1", "--progress.iter_save_progress", "4", "--optim.groups", "[{match: head.*}]",
        "--metric.ConfusionMatrix", "{}", "--metric.MeanAveragePrecision", "{}",
    )  # fmt: skip
    board = EventAccumulator(str(folder / "event")).Reload()
    found = board.Tags()
    scalars = ["loss", "Accuracy", "ConfusionMatrix.balanced_accuracy", "ConfusionMatrix.macro_f1"]
    measured = {f"{split}/{name}" for split in ("Val", "best", "eval") for name in [*scalars, "MeanAveragePrecision"]}
    speed = {"speed/step_seconds", "speed/data_share", "speed/samples_per_second", "speed/memory_GB"}
    speed |= {f"speed/{of}_p{share}_ms" for of in ("step", "data") for share in (50, 95)}
    assert set(found["scalars"]) == {"Train/loss", "Train/grad_norm", *measured, *speed, "lr/head", "lr/rest"}
    assert set(found["images"]) == {"view/train", "view/val", "view/eval"}
    assert {f"run/{name}/text_summary" for name in ("config", "environment", "model")} <= set(found["tensors"])
    best = max(board.Scalars("best/loss"), key=lambda each: each.step)
    assert best.value == min(each.value for each in board.Scalars("Val/loss"))
    left = folder / "eval" / "epoch_000001"
    assert {"00.png", "09.png"} <= {path.name for path in left.iterdir()}


@pytest.mark.parametrize("is_earlier", [False, True])
def test_the_event_folder(runs: Runs, is_earlier: bool) -> None:
    """Runs of earlier versions continue where their files are: otherwise one curve would be two."""
    folder = runs.train("--monitor.writers", "[tensorboard]", "--progress.max_steps", "2")
    for file in list((folder / "event").glob("events.*")) if is_earlier else ():
        file.rename(folder / file.name)
        (folder / "event").rmdir()
    runs.train("--monitor.writers", "[tensorboard]", "--progress.max_steps", "4", "--resume", "auto")
    assert (folder / "event").exists() != is_earlier and bool(list(folder.glob("events.*"))) == is_earlier
    points = EventAccumulator(str(folder if is_earlier else folder / "event")).Reload().Scalars("Train/loss")
    # Files of one second are read in the order of their names, so the order of two quick runs is open.
    assert sorted(point.step for point in points) == [2, 4]
