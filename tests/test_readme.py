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
LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d \w+ +(?P<file>[\w/]+\.py):(?P<line>\d+) ", re.MULTILINE)


@pytest.mark.parametrize("readme", [REPO / "README.md", TEMPLATE / "README.md"], ids=["template", "project"])
def test_log_lines_come_from_where_they_say(readme: Path) -> None:
    """Each line of a log names the place that wrote it; an edit above that place moves it."""
    shown = [(found["file"], int(found["line"])) for found in LOG_LINE.finditer(readme.read_text(encoding="utf-8"))]
    assert shown
    for file, line in dict.fromkeys(shown):
        text = (TEMPLATE / file).read_text(encoding="utf-8").splitlines()[line - 1]
        assert "logger." in text or "self.monitor." in text, f"{file}:{line} is now {text!r}"


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
