"""python -m tools.check: the guarantees on the owner's own code, and what differs first if one does not hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy

from cli.command_line import parse
from cli.program import EvalConfig
from tests.conftest import CONFIG, ENVIRONMENT, PROJECT
from tests.small import NoisyDigits
from tools.check import __main__ as tool
from tools.check.lab import Lab

# What to check: CHECK_CONFIG="configs/one.yaml configs/two.yaml"
MODULE = "tests.tools.test_check"
CONFIGS = os.environ.get("CHECK_CONFIG", "configs/default.yaml").split()


class Counting(NoisyDigits):
    """A mistake: the samples become darker with each one that is read, and no checkpoint holds how many were."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.read = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        self.read += 1
        return {**item, "image": item["image"] / (1 + self.read / 1000)}


class Halves(NoisyDigits):
    """Right: what depends on the epoch is set by `set_epoch`."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "image": item["image"] / (1 + self.epoch % 2)}


class HardHalf:
    """A mistake: the loss of a sample depends on the others of its micro-batch."""

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        losses = cross_entropy(output["logits"], batch["label"], reduction="none")
        return losses[losses >= losses.detach().median()].mean()


BLUR = torch.full((1, 1, 3, 3), 1 / 9)


class Blurred(nn.Module):
    """Right, but only in fp32: a tensor of the module, which no conversion reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.layer(conv2d(image, BLUR, padding=1).flatten(1))
        return result


COUNTING = ["--dataset.train", f"{{type: {MODULE}.Counting}}"]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_the_guarantees_hold(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--config", config]) == 0, capsys.readouterr().out


def lab(*words: str) -> Lab:
    """Return a lab for the tests' config and these words; no run is made."""
    words = ("--config", str(CONFIG), *words)
    return Lab(words, parse(EvalConfig, list(words), prog="check").config, Path("nowhere"))


def check(*words: str) -> tuple[int, dict[str, str]]:
    """Run tools.check by the command line. Returns the exit code, and by name what it found of each check, and why."""
    command = [sys.executable, "-m", "tools.check", "--config", str(CONFIG), *words]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    found = re.findall(r"  (holds|does NOT hold|does not apply) +(\w+)\n(?:    (.*))?", done.stdout)
    return done.returncode, {name: f"{outcome}: {why}".removesuffix(": ") for outcome, name, why in found}


@pytest.mark.slow
def test_by_the_command_line() -> None:
    """The first tensor that differs, and the exit code."""
    code, found = check(*COUNTING, "--only", "resume", "seed")
    assert (code, found["seed"]) == (1, "holds")
    assert found["resume"].startswith("does NOT hold: step 3: input model[0]: ")


@pytest.mark.slow
def test_what_is_right_is_not_accused() -> None:
    """An attribute that `set_epoch` sets is no state; code that runs in fp32 only breaks no promise."""
    words = ["--dataset.train", f"{{type: {MODULE}.Halves}}", "--model", f"{{$REPLACE: true, type: {MODULE}.Blurred}}"]
    code, found = check(*words, "--only", "resume", "accumulate", "evaluation")
    assert code == 0, found
    assert found["resume"] == "holds"
    for name in ("accumulate", "evaluation"):
        assert re.match("does not apply: the code runs, but not in fp64: .*ouble", found[name])


@pytest.mark.slow
def test_a_loss_that_depends_on_the_batch() -> None:
    """The gradient differs first, not the data, which are the same."""
    loss = f"{{$REPLACE: true, mine: {{type: {MODULE}.HardHalf}}}}"
    code, found = check("--loss", loss, "--only", "accumulate")
    assert code == 1 and re.match(r"does NOT hold: step 1: gradient ", found["accumulate"])


def test_a_config_that_cannot_be_read() -> None:
    command = [sys.executable, "-m", "tools.check", "--config", str(CONFIG), "--optim.lr", "-1"]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "optim.lr" in done.stderr and "Traceback" not in done.stderr
