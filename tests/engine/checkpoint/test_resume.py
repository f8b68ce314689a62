"""Exact resume: a run that was cut anywhere and resumed is, to the last bit, the run that was never cut."""

import os
import re
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import common.step
from common.checkpoint.file import read_checkpoint
from common.trainer import Trainer
import train
from tests.checkpoint.test_resume import resumed_by
from tests.conftest import ENVIRONMENT, Runs, copy_of_project, load, run, same
from tests.ranks import several, start_ranks
from tests.resume import cut, differing, final, measured, words


def test_resumed_at_the_last_step(runs: Runs) -> None:
    """A finished run that is resumed stays as it is."""
    folder = runs.train(*words("plain"))
    before = final(folder)
    runs.train(*words("plain", "--resume", "auto"))
    assert differing(before, final(folder)) == []


SIGNALLED = [
    "--loss", "{$REPLACE: true, ce: {type: tests.small.Signalled}}", "--progress.epoch_eval", "1",
    "--dataset.val.eval_batch_size", "32", "--dataset.eval.eval_batch_size", "32",
]  # fmt: skip
PLATEAU = ("--optim.lr_scheduler", "{type: plateau, args: {patience: 1, threshold: 0.9}}")  # counts validations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "call", "step", "owed"),
    [
        # The first two calls try a batch of each set.
        ("plain", 10, 4, ["val"]),  # the third batch of the second validation
        ("early-stop", 10, 4, ["val"]),
        ("workers", 10, 4, ["val"]),
        ("plain", 15, 5, ["eval"]),  # of the evaluation at the end of the first epoch
        ("early-stop", 30, 10, ["eval", "val"]),  # after the last step
        ("workers", 32, 10, ["eval", "val"]),  # the last batch of that
    ],
)
def test_stopped_in_an_evaluation(
    runs: Runs, kind: str, call: int, step: int, owed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation may take longer than a scheduler waits; it is left at once, and made up for."""
    uncut = runs.train(*words(kind, *SIGNALLED, *PLATEAU), name="uncut")
    monkeypatch.setenv("SIGNAL_AT", f"{call} {signal.SIGUSR1.value} eval")
    assert train.main(runs.words(*words(kind, *SIGNALLED, *PLATEAU), name="cut")) == 75
    monkeypatch.delenv("SIGNAL_AT")
    state = load(runs.root / "cut")
    assert (state["position"]["step"], state["owed"]) == (step, owed)
    assert "was interrupted" in (runs.root / "cut" / "train.log").read_text()
    folder = runs.train(*words(kind, *SIGNALLED, *PLATEAU, "--resume", "auto"), name="cut")
    assert same(measured(folder), measured(uncut))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_stopped_in_an_evaluation(runs: Runs, rank: int) -> None:
    """The others leave it too, and save with it."""
    argv = words("warm-up", *SIGNALLED)
    several(runs, 2, runs.words(*argv, name="uncut"))
    environment = {"SIGNAL_AT": f"4 {signal.SIGUSR1.value} eval {rank}"}
    assert start_ranks(runs.root, 2, runs.words(*argv, name="cut"), environment=environment).codes == [75, 75]
    assert load(runs.root / "cut")["owed"] == ["val"]
    several(runs, 2, runs.words(*argv, "--resume", "auto", name="cut"))
    assert same(measured(runs.root / "cut"), measured(runs.root / "uncut"))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--init_from.path", "--resume"])
def test_a_restarted_job_goes_on_with_its_own_run(runs: Runs, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it began with, another run's checkpoint or weights, is where its first start began, and no other."""
    other = runs.train(*words("warm-up", "--progress.max_steps", "3"), name="other")
    begin = [option, str(other / "checkpoints" / "latest.pt")]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    uncut = final(runs.train(*words("warm-up", *begin), name="uncut"))
    cut(runs, "warm-up", 1, *begin)  # it has nothing of its own yet, so it begins once more
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    cut(runs, "warm-up", 6, *begin)
    folder = runs.train(*words("warm-up", *begin), name="cut")
    assert differing(uncut, final(folder)) == []
    assert f"resuming {folder}/checkpoints/latest.pt" in (folder / "train.log").read_text()


@pytest.mark.slow
def test_background_saving_changes_nothing(runs: Runs) -> None:
    """Saving must not move any stream, wherever it happens."""
    uncut = final(runs.train(*words("warm-up"), name="uncut"))
    other = final(runs.train(*words("warm-up", "--checkpoint.background", "true"), name="other"))
    assert differing(uncut, other) == []


def guarantee(folder: Path) -> str:
    """Return the line of the log that says how exact the last resume was."""
    return re.findall(r"this resume .*", (folder / "train.log").read_text())[-1]


@pytest.mark.slow
def test_changed_code(runs: Runs) -> None:
    """Of the engine and of any package beside it: named, and nothing is claimed that the new code may break."""
    copy = copy_of_project(runs.root / "copy")
    command, environment = [sys.executable, "train.py"], {**ENVIRONMENT, "PYTHONPATH": ""}
    assert run([*command, *runs.words("--progress.epoch", "1")], cwd=copy, env=environment).returncode == 0
    (copy / "my_layers").mkdir()
    (copy / "my_layers" / "__init__.py").touch()
    for name in ("common/evaluation/loss.py", "custom/tasks/classification_task.py"):
        with (copy / name).open("a") as file:
            file.write("# edited\n")
    (copy / "library" / "metrics" / "curve_metric.py").unlink()
    assert run([*command, *runs.words("--resume", "auto")], cwd=copy, env=environment).returncode == 0
    message = guarantee(runs.root / "run")
    changed = re.findall(r"not guaranteed to be bit-exact or sample-exact: the code changed: ([^;]*)", message)
    files = [
        "common/evaluation/loss.py",
        "library/metrics/curve_metric.py",
        "custom/tasks/classification_task.py",
        "my_layers/__init__.py",
    ]
    assert sorted(changed[0].split(", ")) == sorted(files)


CHANGES = {
    r"threads 1 -> 2": lambda patch: torch.set_num_threads(2),
    r"environment.MKL_CBWR None -> COMPATIBLE": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    r"numpy [\d.]+ -> 9.9": lambda patch: patch.setattr(
        "common.run.record._version", lambda name: {"numpy": "9.9"}.get(name) or version(name)
    ),
    r"cpu \w+ -> Z80": lambda patch: patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "Z80"),
    r"libraries \[\] -> \['_C\.\S*so'\]": lambda patch: torch.ops.load_library(torch._C.__file__),
}


@pytest.mark.parametrize("shown", CHANGES)
def test_changed_surroundings(runs: Runs, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes other last digits is named, and bit-exactness not claimed."""
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    runs.train("--progress.epoch", "1")
    CHANGES[shown](monkeypatch)
    assert re.search(rf"sample-exact, not bit-exact \({shown}\)", guarantee(runs.train("--resume", "auto")))


def test_another_cut_of_the_batches(runs: Runs) -> None:
    """As many samples in a step, but the gradients are added in another order."""
    runs.train("--batch_size", "12", "--progress.epoch", "1")
    folder = runs.train("--batch_size", "3", "--optim.accumulate", "4", "--resume", "auto")
    assert "sample-exact, not bit-exact (batch_size 12 -> 3; optim.accumulate 1 -> 4" in guarantee(folder)


def without_settling() -> None:
    """A trainer that skips the step for nothing."""
    setattr(common.step, "warm_up_ddp", lambda model, trained, loss, rank: None)  # noqa: B010 - not exported there


@pytest.mark.slow
def test_without_settling_the_buckets(runs: Runs) -> None:
    """The control of the above: three ranks without the step for nothing add up in another order."""
    assert resumed_by(runs, 3, without_settling)


def test_the_best_checkpoint_after_a_resume_from_another(runs: Runs) -> None:
    """It is the one that the log names: of the older checkpoint itself, or of the other run."""
    words = ["--progress.epoch", "3", "--progress.epoch_save_checkpoint", "1", "--metric", "{$REPLACE: true}"]
    first = runs.train(*words, "--best.metric", "loss", name="first")
    worse = ["--optim.lr", "50", "--allow_changes", "true", "--resume"]
    broken = ["--loss", "{$REPLACE: true, ce: {type: tests.small.NotANumber, after: 0}}", *worse]
    assert runs.fail(*words, *broken, str(first / "checkpoints" / "step_00000010.pt"), name="dead") == 2
    names = {path.name: read_checkpoint(path)["position"]["step"] for path in runs.root.glob("dead/checkpoints/*.pt")}
    assert names["latest.pt"] == 10  # it continues there, though it has saved nothing of its own
    folder = runs.train(*words, *worse, str(first / "checkpoints" / "step_00000010.pt"), name="other")
    best = read_checkpoint(folder / "checkpoints" / "best.pt")["position"]["step"]
    assert f"(best.pt: step {best})" in (folder / "train.log").read_text() and best == 10
    runs.train(*words, *worse, str(first / "checkpoints" / "step_00000005.pt"), name="first")
    best = read_checkpoint(first / "checkpoints" / "best.pt")["position"]["step"]
    assert (first / "train.log").read_text().count(f"(best.pt: step {best})") == 1 and best == 5


def test_a_checkpoint_that_was_saved_meanwhile(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that was about to end when this one began: it would be lost."""
    folder = runs.train("--progress.epoch", "1")
    later = runs.train("--progress.epoch", "2", name="later")
    latest = folder / "checkpoints" / "latest.pt"
    restore = Trainer.restore

    def slowly(trainer: Trainer) -> None:
        restore(trainer)
        os.replace(later / "checkpoints" / "latest.pt", latest)

    monkeypatch.setattr(Trainer, "restore", slowly)
    assert runs.fail("--resume", "auto", "--progress.epoch", "3") == 2
    assert read_checkpoint(latest)["position"]["step"] == 10
    assert "was saved by another process" in (folder / "train.log").read_text()
