"""train.py and evaluate.py, run as their users run them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.registry import DATASET_REGISTRY
from tests.conftest import CONFIG, ENVIRONMENT, PROJECT, Runs, load, metrics, run, same
from tests.test_train import Evaluated
from custom.datasets.digits_dataset import DigitsDataset


def test_what_the_constructor_of_a_data_set_draws_is_seeded(runs: Runs) -> None:
    """Each start has the same data."""
    words = [word for split in ("train", "val") for word in (f"--dataset.{split}.type", "tests.small.DrawnDigits")]
    words += ["--progress.epoch", "1"]
    first, second = load(runs.train(*words, name="a")), load(runs.train(*words, name="b"))
    assert same(first["model"], second["model"]) and first["values"] == second["values"]


def test_evaluate_with_its_own_config_and_folder(runs: Runs, tmp_path: Path) -> None:
    """--config is used when given, and --dir.eval_dir."""
    import evaluate

    folder = runs.train("--progress.epoch", "1")
    own, out = tmp_path / "own.yaml", tmp_path / "out"
    own.write_text(f"$BASE: {CONFIG}\nmodel: {{width: 4}}\npictures: {{number: 20}}\n")
    words = ["--config", str(own), "--dir.eval_dir", str(out)]
    assert evaluate.main(["--model_pt", str(folder / "checkpoints" / "latest.pt"), *words]) == 0
    record = json.loads((out / "metrics.json").read_text())
    assert record["samples"] == 297
    assert len(list(out.glob("*.png"))) == 20


def test_evaluation_does_not_read_the_training_data(
    runs: Runs, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """evaluate.py starts fast."""
    folder = runs.train("--progress.epoch", "1")
    modes = []

    class Recording(DigitsDataset):
        def __init__(self, data_dir: Path, mode: str, shift: int = 0) -> None:
            modes.append(mode)
            super().__init__(data_dir, mode, shift)

    monkeypatch.setitem(DATASET_REGISTRY._entries, "DigitsDataset", Recording)
    evaluated(folder / "checkpoints" / "latest.pt")
    assert modes == ["eval"]


def test_numbered_checkpoints_are_kept_by_number(runs: Runs) -> None:
    """The newest of them, and latest and best beside."""
    folder = runs.train("--progress.epoch_save_checkpoint", "2step", "--checkpoint.keep", "2")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best.pt", "latest.pt", "previous.pt", "step_00000008.pt", "step_00000010.pt"]


def test_save_time_saves_between_epochs(runs: Runs) -> None:
    """By the clock, with the true position, not the next epoch's."""
    words = ["--progress.save_time", "0.000001", "--progress.epoch_save_latest", "-1", "--progress.epoch_val", "-1"]
    folder = runs.train(*words, "--progress.epoch", "1")
    assert [entry["step"] for entry in metrics(folder, "checkpoint")] == [1, 2, 3, 4, 5]


def test_initial_evaluation(runs: Runs) -> None:
    """Before the first step."""
    folder = runs.train("--progress.init_eval", "true", "--progress.epoch", "1")
    assert [entry["step"] for entry in metrics(folder, "eval")] == [0]
    assert (folder / "eval" / "epoch_000000" / "metrics.json").is_file()
    runs.train("--progress.init_eval", "true", "--resume", "auto")
    assert [entry["step"] for entry in metrics(folder, "eval")] == [0], "a resume is no start"


@pytest.mark.parametrize("name", ["LBFGS", "SGD", "rmsprop", "torch.optim.NAdam"])
def test_optimizers_by_name(runs: Runs, name: str) -> None:
    """Any torch optimizer trains, LBFGS with its closure too."""
    words = ["--model", "{type: tests.small.Plain}", "--optim.optim_type", name, "--optim.lr", "0.01"]
    folder = runs.train(*words)
    losses = [entry["values"]["loss"] for entry in metrics(folder, "val")]
    assert losses[-1] < losses[0]


def test_rates_of_named_groups(runs: Runs) -> None:
    """Groups of the config have their names in every record."""
    words = ["--optim.groups", "[{match: head.*, lr_mult: 100, name: top}]", "--progress.epoch", "1"]
    values = metrics(runs.train(*words), "train")[-1]["values"]
    assert (values["lr_rest"], values["lr_top"]) == (1e-3, 0.1)
    assert not {"lr", "lr_0", "lr_1"} & values.keys()


@pytest.mark.slow
def test_clipping_and_its_norm(runs: Runs) -> None:
    """The norm before clipping is logged, without fp16's scale; a limit holds the step back."""
    words = ["--optim.optim_type", "SGD", "--optim.lr", "1.0", "--progress.epoch", "1"]
    folder = runs.train(*words, "--optim.clip_gradients", "1e-9")
    assert all(entry["values"]["grad_norm"] > 1e-3 for entry in metrics(folder, "train"))
    free = runs.train(*words, name="free")
    weights = [load(path)["model"]["head.2.weight"] for path in (folder, free)]
    assert not torch.allclose(*weights)
    half = runs.train(*words, "--optim.clip_gradients", "1e-9", "--precision.mode", "fp16", name="half")
    norms = [metrics(path, "train")[0]["values"]["grad_norm"] for path in (folder, half)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_debug_names_the_operation(runs: Runs) -> None:
    """Anomaly detection says which operation made a gradient that is not a number, and where it was called."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 3}}"
    assert runs.fail("--loss", loss, "--debug.debug_mode", "true") == 1
    log = (runs.root / "run" / "train.log").read_text()
    assert "Backward0' returned nan values" in log
    assert "tests/small.py" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, ""),
        pytest.param(signal.SIGTERM, 143, "", marks=pytest.mark.full),
        (signal.SIGUSR1, 75, ""),
        pytest.param(signal.SIGUSR1, 75, "--loader.start_method spawn", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 143, "--loader.start_method forkserver", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 143, "--dist.processes 2", marks=pytest.mark.full),
        (signal.SIGHUP, 129, "--dist.processes 2"),
    ],
)
def test_a_signal_to_all_processes(runs: Runs, number: signal.Signals, code: int, words: str) -> None:
    """As a terminal and a scheduler send it, to the loader's workers too; they serve until all is saved.

    And then they are gone.
    """
    small = ["--progress.epoch", "100000", "--progress.epoch_val", "-1", "--num_workers", "2", *words.split()]
    child = subprocess.Popen(
        [sys.executable, "train.py", *runs.words(*small)],
        cwd=PROJECT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (runs.root / "run" / "checkpoints" / "latest.pt").is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(child.pid, number)
        _, errors = child.communicate(timeout=60)  # until the last of them has closed it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == code, errors
    assert "Traceback" not in errors, errors
    assert "python train.py --resume" in errors.splitlines()[-1]
    assert json.loads((runs.root / "run" / "status.json").read_text())["reason"] == number.name


class Interrupted:
    """A loss that is interrupted twice in its third call."""

    def __init__(self, pause: float) -> None:
        self.pause, self.calls = pause, 0

    def __call__(self, output: dict[str, Any], batch: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        for _ in range(2 if self.calls == 3 else 0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(self.pause)
        return torch.nn.functional.cross_entropy(output["logits"], batch["label"])


class Stuck(DigitsDataset):
    """Never gives an item to a worker."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        while torch.utils.data.get_worker_info() is not None:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.parametrize(("pause", "saved"), [(0.01, True), (1.1, False)])
def test_ctrl_c_twice(runs: Runs, pause: float, saved: bool) -> None:
    """A second Ctrl-C leaves at once; one that is sent to a group and handed on in it too is still the first."""
    words = ["--loss", f"{{$REPLACE: true, ce: {{type: engine.test_train.Interrupted, pause: {pause}}}}}"]
    assert runs.fail(*words, "--progress.epoch_val", "-1", "--best.metric", "ce") == 130
    assert (runs.root / "run" / "checkpoints" / "latest.pt").is_file() is saved


@pytest.mark.slow
def test_a_worker_that_is_stuck_does_not_keep_the_program(runs: Runs) -> None:
    """Given up after loader.timeout; it does not listen to anybody any more, and is ended all the same."""
    words = ["--dataset.train", "{type: engine.test_train.Stuck}", "--num_workers", "1", "--loader.timeout", "2"]
    done = run([sys.executable, "train.py", *runs.words(*words)])
    assert done.returncode == 1
    assert "DataLoader timed out after 2 seconds" in done.stderr


def test_a_hang_up_under_nohup(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal is closed; who said nohup wants the run to continue."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setenv("SIGNAL_AT", f"3 {int(signal.SIGHUP)}")
    words = ["--loss", "{$REPLACE: true, entropy: {type: tests.small.Signalled}}", "--best.metric", "entropy"]
    try:
        folder = runs.train(*words)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert load(folder)["position"]["epoch"] == 2


def test_another_length_changes_the_learning_rates(runs: Runs) -> None:
    """Said with the rates, where the schedule follows the length; with tmax, the length changes nothing."""
    cosine = ["--optim.lr_scheduler.type", "cosine"]
    warned = "step 5 had the learning rate 9.55e-05, and this config gives it 0.000655"
    for name, more, expected in (("run", [], True), ("other", ["--optim.lr_scheduler.tmax", "2epoch"], False)):
        runs.train(*cosine, *more, "--progress.epoch", "1", name=name)
        folder = runs.train(*cosine, *more, "--progress.epoch", "2", "--resume", "auto", name=name)
        assert (warned in (folder / "train.log").read_text()) == expected
