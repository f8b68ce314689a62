"""What the READMEs show of a run is what a run shows, and their recipes work."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO, TEMPLATE

RECIPE = re.compile(r"^```python\n# in ClassificationTask.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOGS_ONE_MORE = """
import torch
from torch import Tensor
from common.evaluation.loss import LossFactory, Losses, LossSums
from common.distributed import Rank
from common.evaluation.metric import MetricFactory
from common.monitor.meter import Meter
from custom.tasks.classification_task import ClassificationTask
import custom.loss  # fills the registry

class Task(ClassificationTask):
{method}
output, batch = dict(logits=torch.tensor([[3.0, 4.0], [0.0, 0.0]])), dict(label=torch.tensor([0, 1]))
loss, metric = LossFactory(dict(CrossEntropyLoss=dict(weight=1.0))), MetricFactory(dict())
losses = Task(torch.nn.Identity(), loss, metric).losses(output, batch)
assert losses["loss"] == losses["CrossEntropyLoss"]
meter, sums = Meter(), LossSums()
meter.add(1, losses, 2)
sums.add(losses, 2, 2)
assert meter.read().raw["logit_norm"] == sums.means(Rank())[0]["logit_norm"] == 2.5
"""
LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d (INFO .*(?:\n  [a-z]+ +.*)*)", re.MULTILINE)


@pytest.mark.slow
def test_the_log_of_the_readmes_is_that_of_a_run(tmp_path: Path) -> None:
    """Each line of a log, and each row below it, but for its numbers: the READMEs show the default config's run."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    train = ["train.py", "--config", "configs/default.yaml", "--progress.epoch", "1", "--dir.expr_dir", str(tmp_path)]
    evaluate = ["evaluate.py", "--model_pt", str(tmp_path / "default" / "checkpoints" / "best.pt")]
    printed = ""
    for command in (train, evaluate):
        done = subprocess.run([sys.executable, *command], cwd=TEMPLATE, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed += done.stderr + done.stdout
    real = rows(printed.replace(str(tmp_path), "experiments"))
    for readme in (REPO / "README.md", TEMPLATE / "README.md"):
        shown = [row for found in LOG_LINE.findall(readme.read_text(encoding="utf-8")) for row in rows(found)]
        assert len(shown) > 6
        assert [row for row in shown if row not in real] == [], readme


def rows(log: str) -> list[str]:
    """Its lines without times, numbers and marks."""
    lines = (re.sub(r"^\d\d:\d\d:\d\d ", "", line).replace("| best |", "|") for line in log.splitlines())
    return [" ".join(re.sub(r"\d[\d.,:/e+-]*", "#", line).split()) for line in lines]


def test_one_more_value_is_logged_as_the_readme_says() -> None:
    """In training and in evaluation, without being minimised."""
    method = RECIPE.search((TEMPLATE / "README.md").read_text(encoding="utf-8"))
    assert method
    program = LOGS_ONE_MORE.replace("{method}", method[1])
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TEMPLATE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
