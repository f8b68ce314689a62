"""Timers of a task's own parts."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Runs, metrics
from custom.tasks.classification_task import ClassificationTask


class SlowTask(ClassificationTask):
    """Waits at least 4 ms in each forward pass, and much longer in an evaluation."""

    def output(self, batch: dict[str, Any]) -> dict[str, Any]:
        with self.timer("rest"):
            time.sleep(0.004 if self.training else 0.1)
        return super().output(batch)


def test_a_part_of_a_step_is_timed(runs: Runs) -> None:
    """Per step, over its micro-batches; in the log and in the speed lines; evaluations do not count."""
    words = ["--task.type", "engine.monitor.test_timers.SlowTask", "--optim.accumulate", "2", "--batch_size", "16"]
    folder: Path = runs.train(*words, "--progress.epoch_val", "1step")
    speed = [row["values"] for row in metrics(folder, "speed")]
    assert len(speed) == 5 and all(8 <= row["rest_ms"] <= 1e3 * row["step_seconds"] for row in speed[1:])
    assert (folder / "train.log").read_text().count(" rest ") == 5
    plain = runs.train("--progress.max_steps", "2", name="plain")
    assert set(speed[0]) - set(metrics(plain, "speed")[0]["values"]) == {"rest_ms"}


def test_a_task_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SlowTask(lambda image: image, None, None)
    assert task.output({"image": 1}) == {"logits": 1}
