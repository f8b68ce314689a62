"""State beyond weights: saved so that it can be loaded, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from common.base.errors import UserError
import evaluate
from tests.conftest import Runs, load
from tests.resume import differing, final
from tests.samples import Digits
from tests.small import Plain

SAVES = ["--progress.epoch_save_latest", "1step", "--progress.epoch_val", "1", "--progress.log_every", "1"]


class Extra(Plain):
    """Counts its training calls in `get_extra_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.zeros(2)

    def forward(self, image: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen = self.seen + image.mean()
        return super().forward(image) + self.calls * 1e-3

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "parts": [self.seen, {"name": "seen", 3: (1.5, None)}]}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.seen = state["calls"], state["parts"][0]


class Made(Plain):
    """Makes a module, a parameter or a buffer in its forward pass: no resume could load it."""

    more: Any
    seen: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, image: Tensor) -> Tensor:
        if self.training and not hasattr(self, "done"):
            self.done = True
            if self.what == "module":
                self.more = nn.Linear(3, 3)
            elif self.what == "parameter":
                self.more = nn.Parameter(torch.zeros(3))
            elif self.what == "buffer":
                self.register_buffer("more", torch.zeros(3))
            elif self.what == "rows":
                self.seen = image.flatten(1)[:2, :4]
            elif self.what == "weight norm":
                weight_norm(self.layers[1])
            else:
                self.layers[3].bias = nn.Parameter(torch.zeros(1))
        return super().forward(image)


class Tied(nn.Module):
    """Tied weights, weight norm from the start, and a buffer that is not saved."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = weight_norm(nn.Linear(64, 10))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(image.flatten(1))))) * self.scale)


class Momentary(Plain):
    """Two buffers that are not saved: training changes one of them."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean.lerp(image.mean(), 0.1)
        return super().forward((image - self.mean) * self.scale)


class Half(Plain):
    """Weights of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image.bfloat16()).float()


class Wide(torch.optim.Optimizer):
    """Keeps averages of 32 bits, whatever the weights are; also nested."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["nested"] = {"average": [torch.zeros_like(p, dtype=torch.float32)]}
                average = state["nested"]["average"][0]
                average.lerp_(p.grad.float(), 0.1)
                p.add_(average.to(p.dtype), alpha=-group["lr"])


class Counting(Digits):
    """Each sample darker than the one read before."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"] * 0.9999**self.read}

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def resumed_is_uncut(runs: Runs, *words: str) -> Path:
    """Train 6 steps at once, and 3 and 3; both end alike, and evaluate.py reads the result."""
    uncut = runs.train(*SAVES, *words, "--progress.max_steps", "6", "--progress.epoch", "null", name="uncut")
    for steps in ("3", "6"):
        cut = runs.train(
            *SAVES, *words, "--progress.max_steps", steps, "--progress.epoch", "null", "--resume", "auto", name="cut"
        )
    assert [part for part in differing(final(uncut), final(cut)) if part != "measured"] == []
    assert evaluate.main(["--model_pt", str(cut / "checkpoints" / "best.pt")]) == 0
    return cut


MODEL = "{{$REPLACE: true, type: tests.checkpoint.test_state.{}}}"


def test_state_that_is_loaded(runs: Runs) -> None:
    state = load(resumed_is_uncut(runs, "--model", MODEL.format("Extra")))
    assert state["model"]["_extra_state"]["calls"] >= 6


def test_a_buffer_that_is_not_saved(runs: Runs) -> None:
    """Named at the first save, once, and by a resume, which is not called bit-exact."""
    words = ["--model", MODEL.format("Momentary"), *SAVES]
    runs.train(*words, "--progress.max_steps", "3")
    log = (runs.train(*words, "--progress.max_steps", "6", "--resume", "auto") / "train.log").read_text()
    assert log.count("changed tensors that are not saved: mean. ") == 2  # by each of the two
    assert "sample-exact, not bit-exact (training changed mean, and the checkpoint does not hold it)" in log


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "Made, what: module",
            r"more.bias: absent when the task was built, a parameter of shape \(3,\), torch.float32 now",
        ),
        ("Made, what: parameter", r"more: absent when the task was built, a parameter"),
        ("Made, what: buffer", r"more: absent when the task was built, a buffer"),
        ("Made, what: rows", r"seen: a buffer of shape \(0, 4\), torch.float32 when .*\(2, 4\), torch.float32 now"),
        (
            "Made, what: weight norm",
            r"layers.1.weight: a parameter of shape \(16, 64\), torch.float32 when .*, absent now",
        ),
        ("Made, what: shape", r"layers.3.bias: a parameter of shape \(10,\).*\(1,\), torch.float32 now"),
    ],
)
def test_state_that_no_resume_could_load(runs: Runs, model: str, said: str) -> None:
    """Refused with the name of the module, before the first save."""
    words = ["--model", MODEL.format(model), "--progress.log_every", "1", "--progress.epoch_val", "-1"]
    assert runs.fail(*words, "--progress.epoch", "50") == 2
    assert re.search(said, (runs.root / "run" / "train.log").read_text())
    assert not list((runs.root / "run" / "checkpoints").glob("*.pt"))


def test_optimizer_state_wider_than_the_weights(runs: Runs) -> None:
    """Its type is what was saved, not the parameter's, to which torch converts it."""
    words = ["--model", MODEL.format("Half"), "--optim.optim_type", "tests.checkpoint.test_state.Wide"]
    state = load(resumed_is_uncut(runs, *words, "--optim.lr", "0.05"))["optimizer"]["state"]
    assert state[0]["nested"]["average"][0].dtype == torch.float32


COUNTING = "{$REPLACE: true, type: tests.checkpoint.test_state.Counting}"


def test_a_dataset_with_a_state(runs: Runs) -> None:
    """Restored with the run, and with it a model of tied weights; with workers, which read copies, it is refused."""
    its_state_is_restored(runs, COUNTING)


def its_state_is_restored(runs: Runs, section: str) -> None:
    resumed_is_uncut(runs, "--model", MODEL.format("Tied"), "--dataset.train", section)
    with pytest.raises(UserError, match=r"state of its own.*workers read copies.*--num_workers 0"):
        runs.train("--dataset.train", section, "--num_workers", "1", name="workers")
