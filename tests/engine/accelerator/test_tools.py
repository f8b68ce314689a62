"""The other programs, on a device that is not the first: what they say without a device in mind means that one."""

from pathlib import Path

import pytest
from PIL import Image

from engine.accelerator.build import HERE
from engine.accelerator.conftest import Accelerator

ANALYZE = """
import sys, torch
from cli.command_line import parse
from tools import analyze
from custom.config import Config
left = []
class Timer(analyze.Timer):
    def blocked_autorange(self, **options):
        times = super().blocked_autorange(**options)
        left.append(torch.emu.queued(1))
        return times
analyze.Timer = Timer
subject = analyze.ProfiledTask(parse(Config, sys.argv[1:]).config, 8)
costs = subject.costs()
assert subject.device == torch.device("emu", 1)
torch.accelerator.synchronize(subject.device)  # at exit, the emulator's thread must have nothing left to do
print(left, costs["bytes_peak"] > 0)
"""
NOTEBOOK = """
import sys, torch
from cli.trained import load_trained
trained = load_trained(sys.argv[1], ["--gpu_ids", "1"])
assert torch.accelerator.current_device_index() == 1, "another device is the current one"
images = torch.zeros(2, 1, 8, 8)
with torch.no_grad():
    print(tuple(trained.task.model(images.to(trained.rank.device)).shape))
"""


@pytest.fixture
def trained(accelerator: Accelerator) -> Path:
    return accelerator.train() / "checkpoints" / "best.pt"


def test_times_are_those_of_work_and_not_of_launches(accelerator: Accelerator) -> None:
    """When tools.analyze has its times, nothing of what it timed is left to do on device 1."""
    words = ("--config", str(HERE.parent / "base.yaml"), "--gpu_ids", "1", "--model.width", "4")
    assert accelerator.good("-c", ANALYZE, *words).splitlines()[-1] == "[0, 0] True"


def test_the_lines_for_a_notebook(accelerator: Accelerator, trained: Path) -> None:
    """The device of a loaded task is the current one: what draws or waits there means it."""
    assert accelerator.good("-c", NOTEBOOK, str(trained)).splitlines()[-1] == "(2, 10)"


def test_predictions_and_exports(accelerator: Accelerator, trained: Path, tmp_path: Path) -> None:
    """On any device what the CPU gives."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        Image.effect_noise((8, 8), 40 + 40 * number).save(images / f"{number}.png")
    found = []
    for on in ("-1", "1"):
        out = tmp_path / f"predictions{on}"
        words = ("--model_pt", str(trained), "--gpu_ids", on, "--input", str(images), "--out", str(out))
        accelerator.good("predict.py", *words)
        [file] = out.glob("*.jsonl")
        found.append(file.read_text())
    assert found[0] == found[1] and len(found[0].splitlines()) == 3
    said = accelerator.good("-m", "tools.export", "--model_pt", str(trained), "--to", "torch", "--gpu_ids", "1")
    assert "model" in said
