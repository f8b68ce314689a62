"""`dist.reduction: fixed` with everything that a step can have; and resumed, restarted, refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from engine.distributed.test_launch import two_agents
from parts.reduction.tree import Branches, add_leaf
from tests.conftest import ErrorOf, Runs
from tests.parts.reduction.test_reduction import FIXED, on, result
from tests.ranks import refused, several
from tests.samples import Classification
from tests.small import Plain
from tests.test_task import TURNS, of

HERE = "engine.distributed.test_reduction"
MORTAL = ["--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}", "--progress.epoch_save_latest", "1step"]
MORTAL += ["--checkpoint.background", "false"]


class Counts(Classification):
    """A loss over items, and a number drawn after each step, which training depends on."""

    drawn: Tensor

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory) -> None:
        super().__init__(model, loss, metric)
        self.register_buffer("drawn", torch.zeros(()))

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        mask = batch["image"] > 0
        losses = nn.functional.cross_entropy(output["logits"], batch["label"], reduction="none")
        return {"loss": (losses[:, None, None, None] * mask).sum() / mask.sum() * (1 + self.drawn)}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["image"] > 0).sum())

    def after_step(self) -> None:
        self.drawn = torch.rand(())


class Sometimes(Plain):
    """A layer that some micro-batches use, one that none uses, and a batch norm that counts all batches alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10, momentum=None)
        self.rare, self.never = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits = self.norm(super().forward(image))
        return self.rare(logits) if float(image[0].sum()) > 19 else logits


class Restless(SGD):
    """Adds noise to the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += 1e-3 * torch.randn_like(parameter)


EVERYTHING = [
    "--optim.clip_gradients", "0.5", "--precision.mode", "bf16", "--num_workers", "2",
    "--loader.collate", "{type: mixup, classes: 10}", "--optim.lr_scheduler", "{type: cosine, warmup: 3step}",
    "--dataset.train", "{type: tests.small.NoisyDigits}", "--progress.train_metric", "true",
]  # fmt: skip
KINDS = {
    "everything": ([1, 2, 4, 8], EVERYTHING),
    "items and draws": ([1, 2, 8], of(f"{HERE}.Counts")),
    "some parameters": ([1, 2, 8], ["--model", f"{{type: {HERE}.Sometimes}}"]),
    "several updates": ([1, 4], [*TURNS, "--progress.epoch_val", "-1"]),
    "fp16": ([1, 2], ["--precision.mode", "fp16"]),
    "16 leaves": ([1, 4], ["--loader.drop_last", "true"]),
    "small buckets": ([1, 4], ["--dist.bucket_mb", "0.001", "--optim.clip_gradients", "0.1"]),
    "noise of the optimizer": ([1, 2], ["--optim.optim_type", f"{HERE}.Restless"]),
    "recomputed": ([1, 2], ["--prepare.activation_checkpointing", "[features.1]", "--prepare.channels_last", "true"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind != "everything")) for kind in KINDS]
)
def test_the_same_bits_on_any_number_of_processes(runs: Runs, kind: str) -> None:
    worlds, words = KINDS[kind]
    given = ["16" if word == "8" and kind == "16 leaves" else word for word in FIXED]
    first, *others = on(runs, worlds, *given, *words)
    assert all(other == first for other in others)


@pytest.mark.slow
def test_the_default_reduction_differs(runs: Runs) -> None:
    """So that the comparison could fail: the same samples in each step, without dropout."""
    plain = ["--model", "{type: tests.small.Plain}", "--progress.log_every", "1"]
    several(runs, 1, runs.words(*plain, "--batch_size", "24", name="one"))
    several(runs, 2, runs.words(*plain, "--batch_size", "12", name="two"))
    assert result(runs.root / "one") != result(runs.root / "two")


@pytest.mark.slow
def test_a_resume_on_another_number_is_exact(runs: Runs) -> None:
    """Begun on 2, cut inside an epoch, continued on 8, cut again, and finished on 1: as if it had been 4 always."""
    words = [*FIXED, *MORTAL]
    several(runs, 4, runs.words(*words, name="uncut"))
    # The first two calls of a process try the model.
    several(runs, 2, runs.words(*words, name="cut"), at=2 + 4 + 2)
    several(runs, 8, runs.words(*words, "--resume", "auto", name="cut"), at=2 + 4)
    several(runs, 1, runs.words(*words, "--resume", "auto", name="cut"))
    assert result(runs.root / "uncut") == result(runs.root / "cut")
    log = (runs.root / "cut" / "train.log").read_text()
    assert log.count("this resume is bit-exact") == 2 and "sample-exact" not in log


@pytest.mark.slow
def test_an_elastic_restart_with_fewer_is_exact(runs: Runs) -> None:
    """torchrun over two nodes, one of which is lost for good: the other has the bits that both would have had."""
    dies = "{$REPLACE: true, ce: {type: tests.small.DiesOnce, node: true}}"
    words = [*FIXED, "--progress.epoch", "3", "--dist.timeout", "30", "--progress.epoch_save_latest", "1step"]
    given = runs.words(*words, "--loss", dies)
    codes, texts = two_agents(runs, given, "--max-restarts=2", nodes="1:2", DIES_ONCE=str(runs.root / "died"))
    assert codes == [0, -9], texts
    assert "this resume is bit-exact" in texts[0] and "samples per step" not in texts[0]
    several(runs, 1, runs.words(*words, "--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}", name="one"))
    assert result(runs.root / "run")[0] == result(runs.root / "one")[0]


class Queue(Classification):
    own_buffers = ("queue",)

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory) -> None:
        super().__init__(model, loss, metric)
        self.register_buffer("queue", torch.zeros(1))


class Sparse(Plain):
    """Looks up what is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 10, sparse=True)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + self.table((image.flatten(1).mean(1) > 0.3).long())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--optim.optim_type", "LBFGS"], "an optimizer that calls a closure"),
        (["--prepare.compile.enabled", "true"], "prepare.compile, whose code"),
        (["--model", f"{{type: {HERE}.Sparse}}", "--optim.optim_type", "SGD"], "the sparse gradient of table.weight"),
        (of(f"{HERE}.Queue"), "own_buffers, which differ"),
        (["--dist.strategy", "fsdp"], "does not work with dist.strategy fsdp"),
        (["--dataset.train", "{type: tests.parts.streams.test_streams.Stream}"], "a stream, shared among"),
    ],
    ids=lambda value: value[-12:] if isinstance(value, str) else value[0],
)
def test_what_cannot_be_had_is_named(error_of: ErrorOf, words: list[str], text: str) -> None:
    assert text in error_of(*FIXED, *words)


@pytest.mark.slow
def test_processes_that_cannot_share_the_tree(runs: Runs) -> None:
    text = refused(runs, 2, runs.words("--dist.reduction", "fixed", "--optim.accumulate", "3"))
    assert "optim.accumulate is 3. It counts the micro-batches of all processes, here 2" in text


@pytest.mark.parametrize("leaves", [1, 2, 4, 8, 32])
def test_every_branch_is_a_part_of_the_tree(leaves: int) -> None:
    """However many processes share it; also with leaves that add nothing."""
    given = torch.randn(leaves, 1000, generator=torch.Generator().manual_seed(leaves))
    given[leaves // 2 + 1 :] = -0.0
    whole = total(given)
    for world in (1 << power for power in range(leaves.bit_length())):
        branches = torch.stack([total(branch) for branch in given.chunk(world)])
        assert torch.equal(total(branches), whole)
    assert leaves < 8 or not torch.equal(given.sum(dim=0), whole)


def total(leaves: Tensor) -> Tensor:
    branches = Branches()
    for leaf in leaves:
        add_leaf(branches, [leaf.clone()])
        assert len(branches) <= len(leaves).bit_length()
    [(_, [whole])] = branches
    return whole
