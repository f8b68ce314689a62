"""train.py and evaluate.py, run as their users run them."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.parts import installed
import train
from tests.conftest import CONFIG, Runs, load, metrics, run, same

Evaluated = Callable[..., dict[str, Any]]
PLAIN = ["--model", "{type: tests.small.Plain}", "--optim.optim_type", "SGD", "--optim.lr", "0.5"]


@pytest.mark.slow
def test_the_default_config_reads_digits(tmp_path: Path) -> None:
    """The default run, as the README gives it, reaches 97 % on the test part."""
    done = run([sys.executable, "train.py", "--config", str(CONFIG), "--dir.runs_dir", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "default"
    assert metrics(folder, "eval")[-1]["values"]["Accuracy"] >= 0.97
    best = run([sys.executable, "evaluate.py", "--model_pt", str(folder / "checkpoints" / "best.pt")])
    assert best.returncode == 0, best.stderr
    values = json.loads((folder / "eval" / "best" / "metrics.json").read_text())["values"]
    assert values["Accuracy"] >= 0.97
    assert f"{values['Accuracy']:.5f}" in best.stdout
    assert len(list((folder / "eval" / "best").glob("*.png"))) == (8 if "pictures" in installed() else 0)
    assert list(folder.glob("event/events.*"))


def test_a_seed_decides_everything(runs: Runs) -> None:
    """Two runs of one seed are equal to the last bit; another seed differs."""
    first, second = load(runs.train(name="a")), load(runs.train(name="b"))
    for part in ("model", "optimizer", "best", "position", "random"):
        assert same(first[part], second[part]), part
    third = load(runs.train("--dist.random_seed", "0", name="c"))
    assert not same(first["model"], third["model"])


def test_ways_to_resume(runs: Runs) -> None:
    """A file, a run folder, or its checkpoints; the log continues in the same file."""
    first = runs.train("--progress.epoch", "1", name="first")
    for name in ("checkpoints/latest.pt", ".", "checkpoints"):
        folder = Path(shutil.copytree(first, runs.root / "run"))
        runs.train("--resume", str(folder / name))
        assert load(folder)["position"]["epoch"] == 2
        assert [entry["step"] for entry in metrics(folder, "val")] == [5, 10]
        log = (folder / "train.log").read_text()
        assert "resuming" in log and "epoch  1" not in log.split("resuming")[1].replace("epoch 1,", "")
        assert (folder / "config.yaml").is_file() and (folder / "config.resume-1.yaml").is_file()
        shutil.rmtree(folder)


def test_auto_starts_afresh_when_there_is_nothing(runs: Runs) -> None:
    """The same command starts a run and continues with it; a finished run stays as it is."""
    folder = runs.train("--resume", "auto")
    before = load(folder)
    runs.train("--resume", "auto")
    assert same(before, load(folder))


def test_a_new_run_from_the_weights_of_another(runs: Runs) -> None:
    """Fine-tuning begins at epoch 0 with a new optimizer, in a folder of its own."""
    first = runs.train(name="first")
    tuned = runs.train(
        "--init_from.path",
        str(first / "checkpoints" / "latest.pt"),
        "--progress.epoch",
        "1",
        "--optim.lr",
        "1e-30",
        name="tuned",
    )
    before, after = load(first), load(tuned)
    assert after["position"] == {"step": 5, "epoch": 1, "sample": 0, "epoch_size": 160}
    assert torch.allclose(before["model"]["head.2.weight"], after["model"]["head.2.weight"])


def test_a_second_run_of_a_name_never_overwrites_the_first(runs: Runs) -> None:
    """The first run's folder is moved, whole."""
    first = runs.train("--progress.epoch", "1")
    kept = load(first)
    runs.train("--progress.epoch", "1", "--dist.random_seed", "1")
    moved = [path for path in runs.root.iterdir() if path.name.startswith("run_")]
    assert len(moved) == 1
    assert same(kept, load(moved[0]))


def test_evaluate_gives_the_number_of_training(runs: Runs, evaluated: Evaluated) -> None:
    """The same evaluator, the same number to the last digit."""
    folder = runs.train("--progress.epoch_eval", "1")
    assert evaluated(folder / "checkpoints" / "latest.pt")["values"] == metrics(folder, "eval")[-1]["values"]
    best = load(folder, "best")
    measured = evaluated(folder / "checkpoints" / "best.pt", "--split", "val")
    assert measured["values"] == best["values"]
    assert measured["step"] == best["position"]["step"]


def test_lengths_and_periods_in_steps_and_parts_of_epochs(runs: Runs) -> None:
    """max_steps ends a run; "0.4epoch" and "3step" are asked the same way; the last step counts."""
    folder = runs.train(
        "--progress.epoch", "null", "--progress.max_steps", "7",
        "--progress.epoch_val", "0.4epoch", "--progress.log_every", "3step",
        "--progress.epoch_save_checkpoint", "4step",
    )  # fmt: skip
    assert [entry["step"] for entry in metrics(folder, "val")] == [2, 4, 6, 7]
    assert [entry["step"] for entry in metrics(folder, "train")] == [3, 6, 7]
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == [
        "step_00000004.pt",
        "step_00000007.pt",
    ]


@pytest.mark.parametrize("split", [("32", "1"), ("8", "4"), ("6", "5")])
def test_accumulation_equals_one_big_batch(runs: Runs, split: tuple[str, str]) -> None:
    """Steps are optimizer steps, and the last window of an epoch, not full, weighs every sample alike."""
    batch, accumulate = split
    model = [*PLAIN, "--debug.max_samples", "150"]
    whole = str(int(batch) * int(accumulate))
    big = load(runs.train(*model, "--batch_size", whole, name="big"))
    small = load(runs.train(*model, "--batch_size", batch, "--optim.accumulate", accumulate, name="small"))
    assert big["position"] == small["position"]
    for key, value in big["model"].items():
        torch.testing.assert_close(small["model"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp64"])
def test_precisions(runs: Runs, mode: str) -> None:
    """Each mode trains; fp64 casts model and batches."""
    folder = runs.train("--precision.mode", mode)
    losses = [entry["values"]["loss"] for entry in metrics(folder, "val")]
    assert losses[-1] < losses[0]
    assert load(folder)["model"]["head.2.weight"].dtype is (torch.float64 if mode == "fp64" else torch.float32)


def test_a_plain_torch_loss_and_a_loss_of_parts(runs: Runs) -> None:
    """Arguments mapped from output and batch; a dict of parts; weights combined; each part recorded."""
    loss = (
        "{$REPLACE: true, ce: {type: torch.nn.CrossEntropyLoss, weight: 0.5,"
        " inputs: {input: output.logits, target: batch.label}},"
        " both: {type: tests.small.two_parts, weight: 2}, off: {type: torch.nn.MSELoss, weight: 0}}"
    )
    folder = runs.train("--loss", loss, "--progress.epoch", "1")
    values = metrics(folder, "val")[-1]["values"]
    assert values["ce"] == values["both.entropy"]
    assert values["loss"] == pytest.approx(0.5 * values["ce"] + 2 * (values["both.entropy"] + values["both.size"]))
    assert "off" not in values


def test_debug_and_the_shipped_configs(runs: Runs) -> None:
    """--debug lays configs/debug.yaml over any config; anomaly detection, every step a line."""
    code = train.main(["--config", str(CONFIG), "--debug", "--dir.runs_dir", str(runs.root)])
    assert code == 0
    assert len(metrics(runs.root / "debug", "train")) == 8
    assert train.main(["--config", "configs/debug.yaml", "--dir.runs_dir", str(runs.root)]) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on_exactly(
    runs: Runs, number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved between two steps, said where, exit code 128 + signal, and nothing lost."""
    words = ["--loss", "{$REPLACE: true, entropy: {type: tests.small.Signalled}}", "--best.metric", "entropy"]
    monkeypatch.setenv("SIGNAL_AT", f"3 {int(number)}")
    assert runs.fail(*words, name="cut") == code
    monkeypatch.delenv("SIGNAL_AT")
    cut = runs.root / "cut"
    assert load(cut)["position"]["step"] == 3
    log = (cut / "train.log").read_text()
    assert "stopped at epoch 1, step 3" in log and f"train.py --resume {cut}\n" in log
    assert json.loads((cut / "status.json").read_text())["state"] == "stopped"
    runs.train(*words, "--resume", "auto", name="cut")
    uncut = runs.train(*words, name="uncut")
    assert same(load(cut)["model"], load(uncut)["model"])


@pytest.mark.slow
def test_two_processes_equal_one(runs: Runs) -> None:
    """Plain DDP by torchrun on gloo, uneven last window; evaluation counts each sample once."""
    model = [*PLAIN, "--debug.max_samples", "149", "--progress.epoch_eval", "1"]
    alone = runs.train(*model, "--batch_size", "32", name="alone")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = run([*launcher, *runs.words(*model, "--batch_size", "16", name="two")])
    assert done.returncode == 0, done.stderr
    two = runs.root / "two"
    first, second = load(alone), load(two)
    assert first["position"] == second["position"]
    for key, value in first["model"].items():
        torch.testing.assert_close(second["model"][key], value, rtol=1e-5, atol=1e-6)
    assert len(second["random"]) == 2
    values = [metrics(folder, "eval")[-1] for folder in (alone, two)]
    assert values[0]["samples"] == values[1]["samples"] == 149
    assert values[0]["values"]["Accuracy"] == values[1]["values"]["Accuracy"]
    assert (two / "train.rank1.log").is_file()
