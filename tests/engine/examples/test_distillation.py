"""The distillation example, where the code of a job is a copy."""

from pathlib import Path

import pytest

from common.config.registry import MODEL_REGISTRY
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from examples.distillation import task
from tests.conftest import Runs


def test_a_copy_of_the_code_finds_the_teacher(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working folder, which is the project's."""
    runs.train("--progress.max_steps", "1", name="teacher")
    monkeypatch.setattr(task, "PROJECT", tmp_path / "copy")
    monkeypatch.chdir(runs.root)
    model = {"type": "ConvModel", "in_channels": 1, "classes": 10, "width": 4}
    for weights in ("teacher/checkpoints/latest.pt", "none.pt"):
        arguments = (MODEL_REGISTRY.build(model), LossFactory({}), MetricFactory({}), model, weights)
        if weights == "none.pt":
            with pytest.raises(Exception, match=r"there is no checkpoint none.pt"):
                task.DistillationTask(*arguments)
        else:
            assert task.DistillationTask(*arguments).teacher is not None
