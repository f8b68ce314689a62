"""Exact resume: a run that was cut anywhere and resumed is, to the last bit, the run that was never cut."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import common.checkpoint.state
import common.data.keyed
import common.data.loader
import common.step
from common.trainer import Trainer
import train
from tests.conftest import ENVIRONMENT, PROJECT, Runs, copy_of_project, load, run, same
from tests.ranks import several, start_ranks
from tests.resume import KINDS, STEPS, cut, differing, final, measured, same_after_cut, words


@pytest.mark.parametrize("kind", KINDS)
def test_cut_in_the_middle_and_resumed(runs: Runs, kind: str) -> None:
    """R-33, D-05, D-17, QQ-39: each thing that has a state, cut inside the second epoch, in the midst of a window."""
    same_after_cut(runs, kind, at=23 if kind == "accumulate" else 8)


@pytest.mark.parametrize("at", range(2, STEPS + 1))
def test_cut_at_any_step(runs: Runs, at: int) -> None:
    """R-60, D-03: before every step: inside an epoch, at its boundary (6), after a validation (3), before the last."""
    same_after_cut(runs, "ema", at=at)


def test_resumed_at_the_last_step(runs: Runs) -> None:
    """A finished run that is resumed stays as it is."""
    folder = runs.train(*words("plain"))
    before = final(folder)
    runs.train(*words("plain", "--resume", "auto"))
    assert differing(before, final(folder)) == []


def test_a_resume_of_a_resume_inside_one_epoch(runs: Runs) -> None:
    """R-60: the second cut is where others drift."""
    same_after_cut(runs, "ema", at=(3, 2, 1))


SIGNALLED = [
    "--loss", "{$REPLACE: true, ce: {type: tests.parts.Signalled}}", "--progress.epoch_eval", "1",
    "--dataset.val.eval_batch_size", "32", "--dataset.eval.eval_batch_size", "32",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plateau", "early-stop", "workers"])
@pytest.mark.parametrize(
    ("call", "step", "owed"),
    [
        # The first two calls try a batch of each set.
        (10, 4, ["val"]),  # the third batch of the second validation
        (15, 5, ["eval"]),  # of the evaluation at the end of the first epoch
        (30, 10, ["eval", "val"]),  # after the last step
        (32, 10, ["eval", "val"]),  # the last batch of that
    ],
)
def test_stopped_in_an_evaluation(
    runs: Runs, kind: str, call: int, step: int, owed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-46, R-60: an evaluation may take longer than a scheduler waits; it is left at once, and made up for."""
    uncut = runs.train(*words(kind, *SIGNALLED), name="uncut")
    monkeypatch.setenv("SIGNAL_AT", f"{call} {signal.SIGUSR1.value} eval")
    assert train.main(runs.words(*words(kind, *SIGNALLED), name="cut")) == 75
    monkeypatch.delenv("SIGNAL_AT")
    state = load(runs.root / "cut")
    assert (state["position"]["step"], state["owed"]) == (step, owed)
    assert "was interrupted" in (runs.root / "cut" / "train.log").read_text()
    folder = runs.train(*words(kind, *SIGNALLED, "--resume", "auto"), name="cut")
    assert same(measured(folder), measured(uncut))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_stopped_in_an_evaluation(runs: Runs, rank: int) -> None:
    """R-46: the others leave it too, and save with it."""
    argv = words("ema", *SIGNALLED)
    several(runs, 2, runs.words(*argv, name="uncut"))
    environment = {"SIGNAL_AT": f"4 {signal.SIGUSR1.value} eval {rank}"}
    assert start_ranks(runs.root, 2, runs.words(*argv, name="cut"), environment=environment).codes == [75, 75]
    assert load(runs.root / "cut")["owed"] == ["val"]
    several(runs, 2, runs.words(*argv, "--resume", "auto", name="cut"))
    assert same(measured(runs.root / "cut"), measured(runs.root / "uncut"))


@pytest.mark.parametrize("worker", ["0", "2"])
def test_workers_do_not_change_the_run(runs: Runs, worker: str) -> None:
    """R-35, D-38: 0 and 2 workers train the same run, and it may be resumed with another number."""
    uncut = final(runs.train(*words("plain"), name="uncut"))
    cut(runs, "plain", 8, "--worker", worker)
    folder = runs.train(*words("plain", "--resume", "auto", "--worker", str(2 - int(worker))), name="cut")
    assert differing(uncut, final(folder)) == []


@pytest.mark.slow
def test_killed_for_real(runs: Runs) -> None:
    """R-33, MM-65: the whole program with its loader workers, SIGKILL at random moments, the same command each time."""
    more = words("ema", "--worker", "2", "--progress.epoch", "8", "--checkpoint.background", "true")
    uncut = final(runs.train(*more, name="uncut"))
    command = [sys.executable, "train.py", *runs.words(*more, "--resume", "auto", name="cut")]
    generator, kills = random.Random(1), 0
    for _ in range(12):
        child = subprocess.Popen(
            command, cwd=PROJECT, env=ENVIRONMENT, stderr=subprocess.DEVNULL, start_new_session=True
        )
        latest = runs.root / "cut" / "checkpoints" / "latest.pt"
        before = latest.stat().st_mtime_ns if latest.exists() else 0
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            if latest.exists() and latest.stat().st_mtime_ns != before and kills < 4:
                time.sleep(generator.uniform(0, 0.15))
                kills += child.poll() is None
                os.killpg(child.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        if child.wait(60) == 0:
            break
    assert kills >= 2
    assert differing(uncut, final(runs.root / "cut")) == []


@pytest.mark.parametrize("start_epoch", ["0", "-1"])
def test_a_restarted_job_goes_on_with_its_own_run(
    runs: Runs, start_epoch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-46: what it began with, another run's checkpoint or weights, is where its first start began, and no other."""
    other = runs.train(*words("ema", "--progress.max_steps", "3"), name="other")
    begin = ["--resume", str(other), "--progress.start_epoch", start_epoch]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    uncut = final(runs.train(*words("ema", *begin), name="uncut"))
    cut(runs, "ema", 1, *begin)  # it has nothing of its own yet, so it begins once more
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    cut(runs, "ema", 6, *begin)
    folder = runs.train(*words("ema", *begin), name="cut")
    assert differing(uncut, final(folder)) == []
    assert f"resuming {folder}/checkpoints/latest.pt" in (folder / "train.log").read_text()


@pytest.mark.parametrize("background", ["true", "false"])
def test_background_saving_changes_nothing(runs: Runs, background: str) -> None:
    """Saving must not move any stream, wherever it happens."""
    uncut = final(runs.train(*words("ema"), name="uncut"))
    other = final(runs.train(*words("ema", "--checkpoint.background", background), name="other"))
    assert differing(uncut, other) == []


class Drawing:
    """A part whose state_dict draws random numbers, and whose number must come back."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        torch.rand(3)
        self.count += 1
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


drawing = Drawing()


def plugin(trainer: Trainer) -> None:
    """What a config names in `plugins`."""
    drawing.count = 0
    trainer.register_state("drawing", drawing)


def test_state_of_ones_own(runs: Runs) -> None:
    """R-53, D-40, QQ-20: registered by a plugin of the config, saved, restored; missing or extra state is told."""
    more = ["--plugins", "[tests.checkpoint.test_resume:plugin]"]
    uncut, _ = same_after_cut(runs, "plain", *more)
    assert load(uncut)["user"] == {"drawing": {"count": STEPS}}
    without = runs.train(*words("plain"), name="without")
    assert runs.fail(*words("plain", *more, "--resume", "auto"), name="without") == 2
    assert "no state of drawing" in (without / "train.log").read_text()


# Negative controls: with one ingredient taken out, the comparison above must fail. Otherwise it would prove nothing.


def _no_random_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(common.checkpoint.state, "set_random_state", lambda state, device: None)


def _no_generator_of_its_own(patch: pytest.MonkeyPatch) -> None:
    class Plain(DataLoader[Any]):
        def __init__(self, *arguments: Any, generator: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)

    patch.setattr(common.data.loader, "DataLoader", Plain)


def _no_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(common.data.keyed, "seed_all", lambda seed: None)


def _leaving_out(part: str, *names: str) -> Any:
    """Checkpoints whose `part` comes back without `names`, as fresh."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = common.checkpoint.state.RunState.load_state_dict

        def load_state_dict(self: Any, state: dict[str, Any], source: Path) -> Any:
            fresh = self.parts[part].state_dict()
            mixed = {**state[part], **{name: fresh[name] for name in names}} if names else fresh
            return original(self, {**state, part: mixed}, source)

        patch.setattr(common.checkpoint.state.RunState, "load_state_dict", load_state_dict)

    return apply


CONTROLS = {
    "random streams": ("plain", _no_random_streams),
    "a generator of the loader's own": ("workers", _no_generator_of_its_own),
    "keys of the samples": ("workers", _no_keys),
    "the optimizer": ("momentum", _leaving_out("optimizer")),
    "the averaged weights": ("ema", _leaving_out("ema", "shadow")),
    "the average's count": ("ema", _leaving_out("ema", "steps", "updates")),
    "the loss scale": ("fp16", _leaving_out("precision")),
    "the plateau's memory": ("plateau", _leaving_out("schedule")),
    "the best value": ("early-stop", _leaving_out("best")),
}


@pytest.mark.parametrize("ingredient", CONTROLS)
def test_without(runs: Runs, ingredient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-33, T6: each ingredient is needed; without it the resumed run differs."""
    kind, remove = CONTROLS[ingredient]
    if ingredient == "the loss scale":  # make the scale move within a few steps, so that losing it shows
        monkeypatch.setattr(torch.amp.GradScaler, "get_growth_interval", lambda self: 2)
        original = torch.amp.GradScaler.__init__
        monkeypatch.setattr(
            torch.amp.GradScaler,
            "__init__",
            lambda self, device, **options: original(self, device, growth_interval=2, **options),
        )
    remove(monkeypatch)
    uncut = final(runs.train(*words(kind), name="uncut"))
    cut(runs, kind, 8)
    assert differing(uncut, final(runs.train(*words(kind, "--resume", "auto"), name="cut")))


# What the log says that a resume keeps.


def guarantee(folder: Path) -> str:
    """The line of the log that says how exact the last resume was."""
    return re.findall(r"this resume .*", (folder / "train.log").read_text())[-1]


@pytest.mark.slow
def test_changed_code(runs: Runs) -> None:
    """R-33: of the engine and of any package beside it: named, and nothing is claimed that the new code may break."""
    copy = copy_of_project(runs.root / "copy")
    command, environment = [sys.executable, "train.py"], {**ENVIRONMENT, "PYTHONPATH": ""}
    assert run([*command, *runs.words("--progress.epoch", "1")], cwd=copy, env=environment).returncode == 0
    (copy / "my_layers").mkdir()
    (copy / "my_layers" / "__init__.py").touch()
    for name in ("common/evaluation/loss.py", "custom/tasks/classification_task.py"):
        with (copy / name).open("a") as file:
            file.write("# edited\n")
    (copy / "custom" / "metric" / "curve_metric.py").unlink()
    assert run([*command, *runs.words("--resume", "auto")], cwd=copy, env=environment).returncode == 0
    told = guarantee(runs.root / "run")
    changed = re.findall(r"not guaranteed to be bit-exact or sample-exact, since the code changed: (.*); state", told)
    files = [
        "common/evaluation/loss.py",
        "library/metrics/curve_metric.py (gone)",
        "custom/tasks/classification_task.py",
        "my_layers/__init__.py (new)",
    ]
    assert changed == [", ".join(sorted(files))]


CHANGES = {
    r"threads 1 -> 2": lambda patch: torch.set_num_threads(2),
    r"environment.MKL_CBWR unset -> COMPATIBLE": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    r"numpy [\d.]+ -> 9.9": lambda patch: patch.setattr("numpy.__version__", "9.9"),
    r"cpu \w+ -> Z80": lambda patch: patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "Z80"),
    r"libraries none -> _C\.\S*so": lambda patch: torch.ops.load_library(torch._C.__file__),
}


@pytest.mark.parametrize("shown", CHANGES)
def test_changed_surroundings(runs: Runs, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-33: what makes other last digits is named, and bit-exactness not claimed."""
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    runs.train("--progress.epoch", "1")
    CHANGES[shown](monkeypatch)
    assert re.search(rf"sample-exact, not bit-exact \({shown}\)", guarantee(runs.train("--resume", "auto")))


def test_another_cut_of_the_batches(runs: Runs) -> None:
    """R-33: as many samples in a step, but the gradients are added in another order."""
    runs.train("--batch_size", "12", "--progress.epoch", "1")
    folder = runs.train("--batch_size", "3", "--optim.accumulate", "4", "--resume", "auto")
    assert "sample-exact, not bit-exact (batch_size 12 -> 3; optim.accumulate 1 -> 4" in guarantee(folder)


# Several processes.


def without_settling() -> None:
    """A trainer that skips the step for nothing."""
    setattr(common.step, "warm_up_ddp", lambda model, trained, loss, rank: None)  # noqa: B010 - not exported there


# Buckets so small that every layer has its own: their order is then what decides in which order gradients are added.
DDP = ["--batch_size", "11", "--model.width", "16", "--optim.ema.decay", "0.9", "--dist.bucket_mb", "0.001"]


def resumed_by(runs: Runs, world: int, setup: Any = None) -> list[str]:
    def argv(name: str, *more: str) -> list[str]:
        return runs.words(*words("plain", *DDP, *more), name=name)

    several(runs, world, argv("uncut"), setup=setup)
    # With the steps for nothing, there are two calls more before the first that counts.
    several(runs, world, argv("cut"), at=6, setup=setup)
    several(runs, world, argv("cut", "--resume", "auto"), setup=setup)
    return differing(final(runs.root / "uncut"), final(runs.root / "cut"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_several_processes(runs: Runs, world: int) -> None:
    """R-33, D-39: with 2 and 3 ranks, uneven last windows, batch norm, dropout on each rank's own stream."""
    assert resumed_by(runs, world) == []
    state = load(runs.root / "cut")
    assert not any(key.startswith("module.") for key in state["model"])
    assert len({tuple(each["torch"].tolist()) for each in state["random"]}) == world


@pytest.mark.slow
def test_without_settling_the_buckets(runs: Runs) -> None:
    """The control of the above: three ranks without the step for nothing add up in another order."""
    assert resumed_by(runs, 3, without_settling)


@pytest.mark.slow
def test_another_number_of_processes(runs: Runs) -> None:
    """2 ranks, then 1: the samples of the epoch not seen yet, each once, and the log says what is guaranteed."""
    several(runs, 2, runs.words(*words("plain", "--batch_size", "16")), at=5)
    seen = load(runs.root / "run")["position"]
    assert (seen["step"], seen["sample"]) == (2, 64)
    assert runs.fail(*words("plain", "--batch_size", "16", "--resume", "auto")) == 2  # other steps
    log = (runs.root / "run" / "train.log").read_text()
    assert "samples per step: 32 in the checkpoint, 16 now" in log
    assert "must stay the same: batch_size * optim.accumulate * processes (2 then, 1 now)" in log
    folder = runs.train(*words("plain", "--batch_size", "32", "--resume", "auto", "--progress.epoch", "1"))
    assert load(folder)["position"]["step"] == 5
    log = (folder / "train.log").read_text()
    assert "this resume is sample-exact, not bit-exact (ranks 2 -> 1; batch_size 16 -> 32)" in log
    assert "random streams of the ranks (dropout) start again" in log
