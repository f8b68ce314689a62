"""What a training imports before its first step: each package takes time at every start."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import TEMPLATE

# Beside those that torch needs for a step: numpy, tqdm, sympy, ... A new one makes each start slower.
PACKAGES = {"PIL", "annotated_types", "loguru", "pydantic", "pydantic_core", "typing_inspection", "yaml"}
BARE = """
import sys
import torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.rand(2, 2)).sum().backward()
optimizer.step()
print(*sys.modules)
"""
OURS = """
import os
import sys
import torch

def leave(output, batch):
    if getattr(leave, "called", False):  # the second call: the first step is done
        print(*sys.modules, flush=True)
        os._exit(0)
    leave.called = True
    return torch.nn.functional.cross_entropy(output["logits"], batch["label"])

sys.modules["program"] = sys.modules["__main__"]
import train
loss = "{leave: {type: program.leave}}"
train.main(["--config", "configs/default.yaml", "--dir.runs_dir", sys.argv[1], "--num_workers", "0", "--loss", loss])
"""


def packages(program: str, *words: str) -> set[str]:
    """Everything imported that is neither Python's own, nor the project's, nor a part of something compiled."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=TEMPLATE, capture_output=True, text=True, check=True
    )
    names = {name.partition(".")[0] for name in done.stdout.split()}
    ours = {path.stem for path in TEMPLATE.iterdir()} | {"program"}
    return {name for name in names - sys.stdlib_module_names - ours if not name.startswith("_")}


@pytest.mark.slow
def test_what_is_imported_before_the_first_step(tmp_path: Path) -> None:
    """Lightning's start takes seconds for what a run may never use; TensorBoard comes with the first log line."""
    assert packages(OURS, str(tmp_path)) - packages(BARE) == PACKAGES
