"""Exact resume: a run that was cut anywhere and resumed is, to the last bit, the run that was never cut."""

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from common.trainer import Trainer
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load
from tests.ranks import several
from tests.resume import KINDS, STEPS, cut, differing, final, same_after_cut, words


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run ends with that was never cut, of the kind "warm-up"."""
    return final(Runs(tmp_path_factory.mktemp("uncut")).train(*words("warm-up")))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "warm-up"])
def test_cut_in_the_middle_and_resumed(runs: Runs, kind: str) -> None:
    """Each thing that has a state, cut inside the second epoch, in the midst of a window."""
    same_after_cut(runs, kind, at=23 if kind == "accumulate" else 8)


@pytest.mark.parametrize(
    "at", [pytest.param(at, marks=() if at % 3 == 1 else pytest.mark.slow) for at in range(2, STEPS + 1)]
)
def test_cut_at_any_step(runs: Runs, uncut: dict[str, Any], at: int) -> None:
    """Before every step: inside an epoch, at its boundary (6), after a validation (3), before the last."""
    cut(runs, "warm-up", at)
    folder = runs.train(*words("warm-up", "--resume", "auto"), name="cut")
    assert differing(uncut, final(folder)) == []
    assert "this resume is bit-exact" in (folder / "train.log").read_text()


def test_a_resume_of_a_resume_inside_one_epoch(runs: Runs, uncut: dict[str, Any]) -> None:
    """The second cut is where others drift."""
    cut(runs, "warm-up", 3)
    for at in (2, 1):
        cut(runs, "warm-up", at, "--resume", "auto")
    assert differing(uncut, final(runs.train(*words("warm-up", "--resume", "auto"), name="cut"))) == []


@pytest.mark.parametrize("worker", ["0", "2"])
def test_workers_do_not_change_the_run(runs: Runs, uncut: dict[str, Any], worker: str) -> None:
    """0 and 2 workers train the same run, and it may be resumed with another number."""
    cut(runs, "warm-up", 8, "--num_workers", worker)
    folder = runs.train(*words("warm-up", "--resume", "auto", "--num_workers", str(2 - int(worker))), name="cut")
    assert differing(uncut, final(folder)) == []


@pytest.mark.slow
def test_killed_for_real(runs: Runs) -> None:
    """The whole program with its loader workers, SIGKILL at random moments, the same command each time."""
    more = words("warm-up", "--num_workers", "2", "--progress.epoch", "8", "--checkpoint.background", "true")
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
    """Install what a config names in `plugins`."""
    drawing.count = 0
    trainer.state.register("drawing", drawing)


def test_state_of_ones_own(runs: Runs) -> None:
    """Registered by a plugin of the config, saved, restored; missing or extra state is reported."""
    more = ["--plugins", "[tests.checkpoint.test_resume:plugin]"]
    uncut, _ = same_after_cut(runs, "plain", *more)
    assert load(uncut)["user"] == {"drawing": {"count": STEPS}}
    without = runs.train(*words("plain"), name="without")
    assert runs.fail(*words("plain", *more, "--resume", "auto"), name="without") == 2
    assert "no state of drawing" in (without / "train.log").read_text()


# Buckets so small that every layer has its own: their order is then what decides in which order gradients are added.
DDP = ["--batch_size", "11", "--model.width", "16", "--dist.bucket_mb", "0.001"]


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
    """With 2 and 3 ranks, uneven last windows, batch norm, dropout on each rank's own stream."""
    assert resumed_by(runs, world) == []
    state = load(runs.root / "cut")
    assert not any(key.startswith("module.") for key in state["model"])
    assert len({tuple(each["torch"].tolist()) for each in state["random"]}) == world


@pytest.mark.slow
def test_another_number_of_processes(runs: Runs) -> None:
    """2 ranks, then 1: the samples of the epoch not seen yet, each once, and the log says what is guaranteed."""
    several(runs, 2, runs.words(*words("plain", "--batch_size", "16")), at=5)
    seen = load(runs.root / "run")["position"]
    assert (seen["step"], seen["sample"]) == (2, 64)
    assert runs.fail(*words("plain", "--batch_size", "16", "--resume", "auto")) == 2  # other steps
    log = (runs.root / "run" / "train.log").read_text()
    assert "samples per step 32 -> 16" in log
    assert "must stay the same: batch_size * optim.accumulate * processes (2 then, 1 now)" in log
    folder = runs.train(*words("plain", "--batch_size", "32", "--resume", "auto", "--progress.epoch", "1"))
    assert load(folder)["position"]["step"] == 5
    log = (folder / "train.log").read_text()
    assert "this resume is sample-exact, not bit-exact (ranks 2 -> 1; batch_size 16 -> 32)" in log
