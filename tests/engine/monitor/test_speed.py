"""The numbers that people compare: operations, MFU, the norm of the gradients. They change no bit."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.config import ConfigError
from common.model.prepare import recompute_in_backward
from parts.speed.flops import count_flops
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several
from tests.samples import Classification
from tests.test_task import of

HERE = "engine.monitor.test_speed"
COUNT = ("--speed.count_flops", "true")
ALONE = ("--dataset.val", "null", "--dataset.eval", "null", "--progress.epoch", "1")
PLAIN = ("--model", "{type: tests.small.Plain}", *ALONE)
TOWER = ("--model", "{type: tests.small.Tower, batch: true}", "--prepare.activation_checkpointing", "[layers.*]")
NOISE = ("--dataset.train", "{type: tests.small.NoisyDigits}", "--precision.mode", "bf16")
STAGES = ("--stages", "[{until: 3step, freeze: [stem.*]}, {}]")


def test_without_a_peak_nothing_is_tried(runs: Runs) -> None:
    """On request it is, and there is still no share of a peak; a peak of nothing is a mistake."""
    rows = [metrics(runs.train(*words, *PLAIN), "speed")[-1]["values"] for words in ((), COUNT)]
    assert [{"tflops", "mfu", "items_per_second"} & row.keys() for row in rows] == [set(), {"tflops"}]
    with pytest.raises(ConfigError, match=r"speed.peak_tflops = 0 (.|\n)* greater than 0"):
        runs.train("--speed.peak_tflops", "0")


@pytest.mark.parametrize("words", [("--optim.accumulate", "2"), NOISE, STAGES], ids=["parts", "generators", "stages"])
def test_counting_changes_no_bit(runs: Runs, words: tuple[str, ...]) -> None:
    """With dropout, running statistics and layers that are computed again: all that a checkpoint holds is the same."""
    plain, counted = (runs.train(*words, *TOWER, *ALONE, *more, name=f"run{len(more)}") for more in ((), COUNT))
    assert all("tflops" in row["values"] for row in metrics(counted, "speed"))
    first, second = load(plain), load(counted)
    assert all(same(first[part], second[part]) for part in ("model", "optimizer", "random"))
    assert [row["values"] for row in metrics(plain, "train")] == [row["values"] for row in metrics(counted, "train")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_counting_changes_no_bit_on_ranks(runs: Runs, strategy: str) -> None:
    """Every rank takes part, past DDP's exchange of gradients and through FSDP's of weights."""
    for name, more in (("plain", ()), ("counted", COUNT)):
        words = ("--model", "{type: tests.small.Tower}", "--dist.strategy", strategy, *ALONE, *more)
        several(runs, 2, runs.words(*words, name=name))
    first, second = (load(runs.root / name) for name in ("plain", "counted"))
    assert all(same(first[part], second[part]) for part in ("model", "optimizer", "random"))
    assert metrics(runs.root / "counted", "speed")[-1]["values"]["tflops"] > 0


def test_frozen_stages_compute_less(runs: Runs) -> None:
    """It is counted again in each stage."""
    folder = runs.train(*STAGES, "--model", "{type: tests.small.Tower}", *ALONE, *COUNT)
    rows = [row["values"] for row in metrics(folder, "speed")]
    per_sample = [1e12 * row["tflops"] / row["samples_per_second"] for row in rows]
    weights = 2 * 64 * 12
    assert per_sample[-1] - per_sample[0] == pytest.approx(weights, rel=1e-6)


class Refuses(Classification):
    """Fails at the first log line, after a batch norm has seen the batch."""

    calls = 0

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += torch.is_grad_enabled()
        if self.calls == 3 and torch.is_grad_enabled():
            raise RuntimeError("not like this")
        return super().losses(output, batch)


def test_a_failed_trial_ends_nothing(runs: Runs) -> None:
    folder, plain = runs.train(*COUNT, *of(f"{HERE}.Refuses"), *TOWER, *ALONE), runs.train(*TOWER, *ALONE, name="plain")
    assert same(load(folder)["model"], load(plain)["model"])
    assert "a trial pass failed: RuntimeError('not like this')" in (folder / "train.log").read_text()
    assert "tflops" not in metrics(folder, "speed")[-1]["values"]


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


def test_what_counts() -> None:
    """Attention on a CPU does, a forward pass that is computed again does not, nor does it matter what is compiled."""
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    assert count_flops(lambda: Attention()(x).sum().backward())["Global"] == 3 * 2 * (2 * 2 * 8 * 8 * 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain = count_flops(lambda: model(x).sum().backward())
    recompute_in_backward(model)
    assert count_flops(lambda: model(x).sum().backward())["Global"] == plain["Global"] == 3 * 2 * 2 * 16 * 16


@pytest.mark.slow
def test_compiled_modules_count_as_if_they_were_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(16, 4)
    model.compile(backend="aot_eager")
    model(x)
    assert count_flops(lambda: model(x).sum().backward())["Global"] == 2 * 2 * 16 * 16


@pytest.mark.parametrize("clipped", [False, True])
def test_the_norm_of_the_gradients(runs: Runs, *, clipped: bool) -> None:
    """Of plain SGD, it is the length of the step."""
    sgd = "{optim_type: SGD, lr: 1, weight_decay: 0, lr_scheduler: {$REPLACE: true, type: constant}}"
    every = ("--progress.log_every", "1", "--progress.epoch_save_checkpoint", "1step", "--checkpoint.keep", "9")
    limit = ", clip_gradients: 1.0e+9}" if clipped else "}"
    folder = runs.train(*every, *PLAIN, "--optim", sgd[:-1] + limit)
    one, two = (load(folder, f"step_{step:08}")["model"] for step in (1, 2))
    length = sum((one[name] - two[name]).double().square().sum() for name in one) ** 0.5
    row = next(row for row in metrics(folder, "train") if row["step"] == 2)
    assert row["values"]["grad_norm"] == pytest.approx(float(length), rel=1e-4)


class Sparse(nn.Module):
    """Its table has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 10, sparse=True)

    def forward(self, image: Tensor) -> Tensor:
        return self.table((image.flatten(1)[:, :16] > 0).long()).sum(1)


def test_sparse_gradients_have_a_norm(runs: Runs) -> None:
    words = ["--optim.optim_type", "SparseAdam", "--optim.weight_decay", "0", *ALONE]
    folder = runs.train(*words, "--model", f"{{type: {HERE}.Sparse}}")
    assert all(row["values"]["grad_norm"] > 0 for row in metrics(folder, "train"))
