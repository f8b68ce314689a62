"""Each example has on a late device the bits that it has on one that is never late."""

import pytest

from engine.accelerator.conftest import Accelerator, differing
from tests.examples.test_examples import EXAMPLES

STEPS = (
    "--monitor.writers", "[]", "--progress.epoch", "null", "--progress.log_every", "2",
    "--progress.epoch_val", "2step", "--progress.epoch_eval", "-1", "--progress.epoch_save_latest", "2step",
)  # fmt: skip
# Its weights are those of another run: the engine's tests of the example have them.
LEFT_OUT = {"distillation"}
MOST = {"stages": "16"}  # its second stage begins at step 15


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "vision_recipe" else pytest.mark.full)
        for name in sorted(EXAMPLES.keys() - LEFT_OUT)
    ],
)
def test_it_has_the_same_bits_late(accelerator: Accelerator, name: str) -> None:
    folders = []
    for mode in ("eager", "lazy"):
        place = ("--gpu_ids", "1", "--name", mode, "--dir.runs_dir", str(accelerator.runs.root))
        config = ("--config", f"examples/{name}/config.yaml", "--progress.max_steps", MOST.get(name, "4"))
        accelerator.good("train.py", *config, *place, *STEPS, *EXAMPLES[name].short, mode=mode)
        folders.append(accelerator.runs.root / mode)
    assert differing(*folders) == []
