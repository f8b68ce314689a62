"""The step is as short to run as to read: frames to the model, and Python calls, which are the same on any machine."""

import subprocess
import sys
from pathlib import Path

from support import TEMPLATE

# Of functions in common/, comprehensions apart, which are calls up to Python 3.11. To raise it is a decision, as for a
# budget of lines: what does the new call give to a run that does not use the feature?
# Six more than the 40 of before: what is due is calculated in each step, and one method says when a run is over; a
# gradient that is not finite is found in its own step; generators of a dataset's own are seeded; a step reads the same
# with fp16, with fp64 and without, and whether or not a task has `after_step`.
CALLS = 46
FRAMES = ["train", "__call__", "gradients", "update", "output"]
PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from common.build import build_run
from common.config import resolve
from common.run_context import managed_run
from common.trainer import Trainer
from custom.config import Config

COMMON = str(Path.cwd() / "common")
FIRST, LAST = 60, 90  # steps between two log lines
calls, frames = 0, []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, image):
        frame = sys._getframe(1)
        while self.training and frames[-1:] != ["train"]:
            if frame.f_code.co_filename.startswith(str(Path.cwd())):
                frames.append(frame.f_code.co_name)
            frame = frame.f_back
        return self.layer(image.flatten(1))


def count(frame, event, argument):
    global calls
    code = frame.f_code
    calls += event == "call" and code.co_filename.startswith(COMMON) and not code.co_name.startswith("<")


def watch():
    step = trainer.progress.at.step
    if step in (FIRST, LAST):
        sys.setprofile(count if step == FIRST else None)


sys.modules["program"] = sys.modules["__main__"]
words = ["--name", "calls", "--dir.runs_dir", sys.argv[1], "--model", "{type: program.Net}", "--gpu_ids", "-1"]
words += ["--dataset", "{val: null, eval: null}", "--progress.max_steps", "95"]
words += ["--batch_size", "1", "--num_workers", "0"]
resolved = resolve(Config, ["configs/default.yaml"], words)
with managed_run(resolved.config, resolved, words) as run:
    built = build_run(resolved.config, run.rank)
    run.open()
    trainer = Trainer(resolved.config, built, run)
    trainer.monitor.after_step.append(watch)
    trainer.train()
print(calls / (LAST - FIRST), *reversed(frames))
"""


def test_calls_of_a_step(tmp_path: Path) -> None:
    """Of the loop, the data and the step, between two log lines: a feature that is off is not in the step."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=TEMPLATE, capture_output=True, text=True, check=True)
    calls, *frames = done.stdout.split()
    assert frames == FRAMES
    assert float(calls) == CALLS, "fewer are welcome: lower the number"
