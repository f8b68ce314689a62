"""`dist.reduction: fixed`: the same bits on any number of processes."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.base.nested import map_leaves
from tests.conftest import ErrorOf, Runs, load, metrics
from tests.ranks import several
from tests.small import Plain

HERE = "tests.parts.reduction.test_reduction"
# 160 samples: in an epoch's last step, 2 micro-batches are full, one has 4 samples, and 5 have none.
FIXED = ["--dist.reduction", "fixed", "--batch_size", "6", "--optim.accumulate", "8", "--progress.log_every", "1"]


def sha256(folder: Path, *parts: str) -> str:
    """Return the SHA-256 of every number in these parts of a run's last checkpoint."""
    digest, state = hashlib.sha256(), load(folder)

    def add(value: Any, path: tuple[Any, ...]) -> None:
        is_tensor = isinstance(value, Tensor)
        digest.update(repr((path, None if is_tensor else value)).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if is_tensor else b"")

    map_leaves({part: state[part] for part in parts}, add)
    return digest.hexdigest()


def result(folder: Path) -> tuple[Any, ...]:
    """All that a run ends with: weights, buffers, averages, moments, and every number that was measured."""
    parts = ("model", "task", "optimizer", "precision", "schedule", "best", "values", "position", "random")
    digest = sha256(folder, *parts)
    return digest, *([entry["values"] for entry in metrics(folder, event)] for event in ("train", "val"))


def on(runs: Runs, worlds: list[int], *words: str) -> list[tuple[Any, ...]]:
    """The results of a run on so many processes, for each of `worlds`."""
    for world in worlds:
        several(runs, world, runs.words(*words, name=f"on_{world}"))
    return [result(runs.root / f"on_{world}") for world in worlds]


@pytest.mark.slow
def test_two_processes_have_the_bits_of_one(runs: Runs) -> None:
    """With dropout, batch norm, augmentation, and a last step with micro-batches that are smaller or empty."""
    alone, shared = on(runs, [1, 2], *FIXED)
    assert len(alone[1]) == 8 and alone[1][0] != alone[1][1]
    assert alone == shared
    assert load(runs.root / "on_2")["model"]["features.0.1.num_batches_tracked"] == 8  # once per step


def test_it_is_the_step_of_the_default(runs: Runs) -> None:
    """Without dropout: the same weights as the default's, up to the order of sums; to the last bit without sums."""
    plain = ["--model.dropout", "0", "--optim.clip_gradients", "1", "--optim.optim_type", "SGD"]
    for size, accumulate, apart in ((32, 1, 0.0), (8, 4, 1e-6)):
        words = [*plain, "--batch_size", str(size), "--optim.accumulate", str(accumulate), "--precision.mode", "fp64"]
        usual, fixed = (
            load(runs.train(*words, "--dist.reduction", kind, name=f"{kind}{size}"))["model"]
            for kind in ("default", "fixed")
        )
        for name, value in usual.items():
            if "running" not in name and "num_batches" not in name:
                assert float((value - fixed[name]).abs().max()) <= apart, name
            elif size == 32:
                assert torch.allclose(value, fixed[name]), name


class Noisy(Plain):
    """Draws from a generator of its own, which nothing can seed."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(self.noise(image))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return x + torch.rand(x.shape, generator=generator)


class Cached(Plain):
    """Keeps a running mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(image.detach().mean(), 0.1)
        return super().forward(image)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dist.sync_bn", "true"], "does not work with dist.sync_bn"),
        (["--model", f"{{type: {HERE}.Noisy}}"], "differs in the gradient of"),
        (["--model", f"{{type: {HERE}.Cached}}"], "buffer mean, which a batch changes: change it in"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_cannot_be_had_is_named_before_the_first_step(error_of: ErrorOf, words: list[str], text: str) -> None:
    assert text in error_of(*FIXED, *words)
