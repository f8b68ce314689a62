"""What each process changes: its own buffers, others that differ, objects of plugins, closures."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.trainer import Trainer
from tests.conftest import Runs, load, metrics, same
from tests.ranks import refused, several
from custom.tasks.classification_task import ClassificationTask

HERE = "engine.distributed.test_buffers"
# 1,200 samples in steps of 32: the last one has 16, of which a rank has none if it takes 16 at a time.
EPOCH = ["--debug.max_samples", "1200", "--progress.epoch", "1", "--model", "{type: tests.small.Plain}"]
EPOCH += ["--precision.mode", "fp64", "--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}"]


class Counting(ClassificationTask):
    """Counts labels on all processes, as in docs/task.md; and has an environment of each process."""

    own_buffers: ClassVar[Sequence[str]] = ("counts", "env*")
    seen: Tensor
    counts: Tensor
    env: Tensor

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory) -> None:
        super().__init__(model, loss, metric)
        self.register_buffer("seen", torch.zeros(10, dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(10, dtype=torch.int64), persistent=False)
        self.register_buffer("env", torch.full((2,), float(os.environ.get("RANK", "0"))))

    def update(self, name: str, batch: dict[str, Tensor]) -> Losses:
        losses = super().update(name, batch)
        self.counts += batch["label"].bincount(minlength=10)
        self.env = (self.env * 1.5 + batch["image"].mean()).remainder(7)
        # Training depends on all of them.
        return {**losses, "loss": losses["loss"] * (1 + (self.env.sum() + self.seen[0] % 7) / 50)}

    def after_step(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.counts)
        self.seen += self.counts
        self.counts.zero_()


class Undeclared(Counting):
    """As its owner wrote it, who did not think of other processes."""

    own_buffers: ClassVar[Sequence[str]] = ()

    def after_step(self) -> None:
        self.seen += self.counts
        self.counts.zero_()


class Simple(Counting):
    """Its training depends on nothing that differs between numbers of processes."""

    def update(self, name: str, batch: dict[str, Tensor]) -> Losses:
        super().update(name, batch)
        return self.losses(self.output(batch), batch)


def task(name: str) -> list[str]:
    return ["--task", f"{{type: {HERE}.{name}}}"]


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def apart(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference between two state dicts."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def resumed(runs: Runs, words: list[str], *, calls: int, world: int = 2) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the last states of an uncut run and of one cut at training call `calls`, and the log of the second."""
    words = [
        "--progress.epoch_save_latest",
        "1step",
        "--progress.log_every",
        "1",
        "--checkpoint.background",
        "false",
        *words,
    ]
    several(runs, world, runs.words(*words, name="uncut"))
    several(runs, world, runs.words(*words, name="cut"), at=calls)
    several(runs, world, runs.words(*words, "--resume", "auto", name="cut"))
    states = [load(runs.root / name) for name in ("uncut", "cut")]
    for state in states:
        del state["about"]
    return states[0], states[1], log(runs.root / "cut")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "batch", "more"),
    [
        (3, "16", ["--optim.accumulate", "2"]),
        (2, "16", ["--dist.strategy", "fsdp"]),
        (2, "16", ["--dist.broadcast_buffers", "false"]),
    ],
)
def test_what_all_processes_count_is_what_one_counts(runs: Runs, world: int, batch: str, more: list[str]) -> None:
    """Every sample counts once; borrowed samples, trial batches and evaluations do not count."""
    accumulate = 2 if "--optim.accumulate" in more else 1
    several(runs, world, runs.words(*EPOCH, *task("Simple"), *more, "--batch_size", batch))
    runs.train(*EPOCH, *task("Simple"), "--batch_size", str(world * int(batch) * accumulate), name="one")
    one, state = load(runs.root / "one")["task"], load(runs.root / "run")
    assert state["task"]["seen"].sum() == 1200
    assert torch.equal(state["task"]["seen"], one["seen"])
    assert "differ between the processes" not in log(runs.root / "run")
    first, second = (each["buffers"]["env"] for each in state["ranks"][:2])
    assert same(first, state["task"]["env"]) and not same(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resume_is_exact_with_own_buffers(runs: Runs, strategy: str) -> None:
    """Cut inside the epoch; other numbers of processes are refused, since each has an environment of its own."""
    words = [*EPOCH, *task("Counting"), "--batch_size", "16", "--dist.strategy", strategy]
    uncut, cut, text = resumed(runs, words, calls=21)
    assert same(uncut, cut)
    assert "this resume is bit-exact" in text
    if strategy == "ddp":
        words[words.index("16")] = "32"
        assert runs.fail(*words, "--resume", "auto", name="cut") == 2
        assert "for each of 2 processes (env), but this run has 1: use 2 processes" in log(runs.root / "cut")


@pytest.mark.slow
def test_buffers_that_differ_are_named(runs: Runs) -> None:
    """Once, at the first save; and a resume without their exchange is not called exact."""
    words = [*EPOCH, *task("Undeclared"), "--batch_size", "16", "--progress.max_steps", "6"]
    words += [
        "--progress.epoch_val",
        "2step",
        "--dist.broadcast_buffers",
        "false",
        "--progress.epoch_save_latest",
        "3step",
        "--checkpoint.background",
        "false",
    ]
    several(runs, 2, runs.words(*words), at=6)  # the save of step 3: of one after a validation, all have the same
    several(runs, 2, runs.words(*words, "--resume", "auto"))
    text = log(runs.root / "run")
    assert text.count("buffers that differ between the processes: env, seen.") == 2  # once in each start
    assert "declare them in Undeclared.own_buffers" in text
    assert "sample-exact, not bit-exact (env, seen differed between the processes" in text


def test_a_mistake_in_a_declaration(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "own_buffers", ("sene",))
    assert runs.fail(*EPOCH, *task("Counting")) == 2
    message = "Counting.own_buffers: sene matches none of the model's 3 names; did you mean seen?"
    assert message in log(runs.root / "run")


class Counter:
    """A plugin's object: what it holds differs between the processes, or not."""

    def __init__(self, trainer: Trainer) -> None:
        self.values = torch.zeros(2)
        self.number = trainer.rank.rank if "own" in trainer.config.name or "cut" in trainer.config.name else 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["number"] == self.number, f"{state} on rank {self.number}"


def registering(trainer: Trainer) -> None:
    trainer.state.register("counter", Counter(trainer))


@pytest.mark.slow
def test_registered_objects_are_saved_for_each_rank(runs: Runs) -> None:
    """If they differ; then only as many processes can continue."""
    words = ["--plugins", f"[{HERE}:registering]", "--model", "{type: tests.small.Plain}", "--progress.max_steps"]
    for name in ("same", "own"):
        several(runs, 2, runs.words(*words, "2", "--batch_size", "16", name=name))
    several(runs, 2, runs.words(*words, "4", "--batch_size", "16", "--resume", "auto", name="own"))
    assert [each["user"]["counter"]["number"] for each in load(runs.root / "own")["ranks"]] == [0, 1]
    assert load(runs.root / "same")["ranks"] == []
    runs.train(*words, "4", "--resume", "auto", name="same")
    assert runs.fail(*words, "6", "--resume", "auto", name="own") == 2
    assert "each of 2 processes (counter), but this run has 1" in log(runs.root / "own")


class Halving(Optimizer):
    """An optimizer of the owner's with a closure: halves its step until the loss falls."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> float:  # type: ignore[override]
        with torch.enable_grad():
            loss = float(closure())
        pairs = [(each, each.clone(), each.grad.clone()) for group in self.param_groups for each in group["params"]]
        for power in range(12):
            for each, before, gradient in pairs:
                each.copy_(before - self.param_groups[0]["lr"] * 0.5**power * gradient)
            with torch.enable_grad():
                if float(closure()) < loss:
                    break
        return loss


class Alone(Halving):
    """Calls its closure more often on one rank."""

    def step(self, closure: Any) -> float:  # type: ignore[override]
        for _ in range(1 + int(os.environ["RANK"])):
            closure()
        return 0.0


LBFGS = ["--optim.optim_type", "LBFGS", "--optim.lr", "1.0", "--optim.args"]
FULL = [
    "--model",
    "{type: tests.small.Plain}",
    "--precision.mode",
    "fp64",
    "--debug.max_samples",
    "96",
    "--progress.epoch",
]


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_the_logged_loss_of_a_step_with_a_closure(runs: Runs, accumulate: str) -> None:
    """It is that of the weights with which the step began, as for every optimizer; not of those that a search tried."""
    words = [*FULL, "1", "--progress.max_steps", "1", "--progress.log_every", "1", "--optim.accumulate", accumulate]
    losses = []
    for optimizer in ([*LBFGS, "{line_search_fn: strong_wolfe, max_iter: 4}"], ["--optim.optim_type", "SGD"]):
        [row] = metrics(runs.train(*words, *optimizer, "--optim.weight_decay", "0", name=optimizer[1]), "train")
        losses.append(row["values"]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "optimizer", "accumulate"),
    [
        (3, [*LBFGS, "{line_search_fn: strong_wolfe}"], 2),
        (2, [*LBFGS, "{max_iter: 10}"], 2),
        (2, ["--optim.optim_type", f"{HERE}.Halving", "--optim.lr", "8"], 1),
    ],
)
def test_closures_decide_by_the_loss_of_all_ranks(
    runs: Runs, world: int, optimizer: list[str], accumulate: int
) -> None:
    """Line searches take the same decisions on every rank, those of one process."""
    words = [*FULL, "2", *optimizer, "--optim.accumulate", str(accumulate)]
    several(runs, world, runs.words(*words, "--batch_size", str(96 // world // accumulate)))
    one = runs.train(*words, "--batch_size", str(96 // accumulate), name="one")
    assert apart(load(one)["model"], load(runs.root / "run")["model"]) < 1e-9
    losses = [[row["values"]["loss"] for row in metrics(folder, "val")] for folder in (one, runs.root / "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.slow
def test_lbfgs_resumes_exactly_on_two_ranks(runs: Runs) -> None:
    optimizer = [*LBFGS, "{line_search_fn: strong_wolfe, max_iter: 5}", "--batch_size", "48"]
    words = [*FULL, "5", *optimizer, "--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}"]
    uncut, cut, text = resumed(runs, words, calls=20)
    assert same(uncut, cut)
    assert "this resume is bit-exact" in text


@pytest.mark.slow
def test_a_closure_that_ranks_call_differently_is_refused(runs: Runs) -> None:
    """Instead of waiting for dist.timeout."""
    said = refused(runs, 2, runs.words(*FULL, "1", "--optim.optim_type", f"{HERE}.Alone", "--batch_size", "48"))
    assert "optim.optim_type Alone calls its closure again on 1 of 2 processes" in said
    words = [*FULL, "1", "--optim.optim_type", f"{HERE}.Halving", "--dist.strategy", "fsdp"]
    assert "Halving needs whole gradients: use dist.strategy ddp" in refused(runs, 2, runs.words(*words))
