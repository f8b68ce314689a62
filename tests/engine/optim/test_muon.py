"""Muon with AdamW, by docs/parts/optimizers.md: a convolutional net and a GPT learn, and resume to the bit."""

import os
import re
from pathlib import Path

import pytest

from common.trainer import Trainer
import train
from tests.conftest import PROJECT, Runs, load, metrics
from tests.resume import differing, final
from tests.small import Killed

# The config of the page, on the page's base and on another.
PAGE = (PROJECT / "docs/parts/optimizers.md").read_text()
[PRESET] = re.findall(r"```yaml\n# configs/muon.yaml\n(.*?)```", PAGE, re.DOTALL)
TEXT = "type: examples.language_model.data.Text, context: 16, length: 8000"
SAMPLES = {
    "convolutional": ("configs/default.yaml", ["--model.width", "8", "--debug.max_samples", "640"]),
    "gpt": (
        "examples/language_model/config.yaml",
        [
            *("--model", "{width: 32, heads: 2, context: 16, dropout: 0.1}", "--task.length", "8"),
            *("--dataset.train", f"{{{TEXT}}}", "--dataset.val", f"{{{TEXT}, eval_batch_size: 50}}"),
            *("--optim.lr_scheduler.warmup", "2step"),
        ],
    ),
}
STEPS = [
    "--progress.epoch", "null", "--progress.max_steps", "60", "--progress.epoch_val", "20step", "--progress.log_every",
    "1", "--progress.epoch_save_latest", "1step", "--progress.epoch_eval", "-1", "--monitor.writers", "[]",
    "--checkpoint.background", "false", "--batch_size", "32", "--plugins", "[engine.optim.test_muon.killed]",
]  # fmt: skip


def killed(trainer: Trainer) -> None:
    """Kill the run after the step that the environment names, as a plugin."""

    def kill() -> None:
        if trainer.at.step == int(os.environ.get("KILL_AFTER", "0")):
            raise Killed

    trainer.monitor.after_step.append(kill)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_preset_trains_a_net_and_resumes_to_the_bit(
    runs: Runs, sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muon has the matrices and nothing else; AdamW the kernels of convolutions (4-D), norms and biases."""
    base, small = SAMPLES[sample]
    config = tmp_path / "muon.yaml"
    config.write_text(PRESET.replace("$BASE: default.yaml", f"$BASE: {PROJECT / base}"))
    words = ["--config", str(config), "--dir.runs_dir", str(runs.root), *small, *STEPS]
    assert train.main([*words, "--name", "whole"]) == 0
    monkeypatch.setenv("KILL_AFTER", "37")
    with pytest.raises(Killed):
        train.main([*words, "--name", "cut"])
    monkeypatch.delenv("KILL_AFTER")
    assert train.main([*words, "--name", "cut", "--resume", "auto"]) == 0
    whole, cut = runs.root / "whole", runs.root / "cut"
    assert differing(final(whole), final(cut)) == []
    losses = [entry["values"]["loss"] for entry in metrics(cut, "val")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2
    state = load(cut)
    shapes = {name: len(value.shape) for name, value in state["model"].items()}
    for group in state["optimizer"]["param_groups"]:
        is_muon = group.get("optim_type", "").endswith("Muon")
        assert {shapes[name] == 2 for name in group["param_names"]} == {is_muon}
        assert all(("momentum_buffer" in state["optimizer"]["state"][n]) == is_muon for n in group["params"])
