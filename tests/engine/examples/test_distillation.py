"""The distillation example, where the code of a job is a copy."""

from pathlib import Path

import pytest

from common.base.errors import UserError
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
    arguments = (MODEL_REGISTRY.build(model), LossFactory({}), MetricFactory({}), model)
    assert task.DistillationTask(*arguments, "teacher/checkpoints/latest.pt").teacher is not None
    with pytest.raises(UserError, match=r"there is no checkpoint none.pt"):
        task.DistillationTask(*arguments, "none.pt")
