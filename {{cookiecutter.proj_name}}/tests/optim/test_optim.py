"""Optimizers, clipping and number formats, as a configuration asks for them."""

from dataclasses import field
from pathlib import Path

import pytest
import torch
from torch import nn

from common.base.errors import UserError
from common.config import resolve, section
from common.optim import Clip, OptimConfig, build_optimizer
from common.optim.precision import Precision, PrecisionConfig, build_precision

CPU = torch.device("cpu")
TORCH_OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS")  # the second trains sparse gradients only, the third is a part
)


@section
class Root:
    """The two sections under test."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """how weights change"""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """number formats"""


@pytest.fixture
def configured(tmp_path: Path):
    def read(**sections: str) -> Root:
        path = tmp_path / "config.yaml"
        path.write_text("".join(f"{name}: {text}\n" for name, text in sections.items()))
        return resolve(Root, [path]).config

    return read


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def backward(precision: Precision, loss: torch.Tensor) -> None:
    """As in a step."""
    precision.scaler.scale(loss).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_every_torch_optimizer_trains_or_says_why_not(configured, name: str) -> None:
    """Each class of torch.optim by name."""
    config = configured(optim=f"{{optim_type: {name.lower()}, lr: 0.01}}").optim
    model = mlp()
    if name == "Muon":
        with pytest.raises(UserError, match=r"Muon cannot train Sequential: .*2D"):
            build_optimizer(config, model)
        return
    optimizer = build_optimizer(config, model)
    assert type(optimizer) is getattr(torch.optim, name)
    before = loss_of(model).item()
    train(model, optimizer, 5)
    assert loss_of(model).item() < before


def test_weight_decay_zero_is_zero(configured) -> None:
    """AdamW's own default of 0.01 does not slip in; a written value arrives."""
    assert build_optimizer(configured().optim, mlp()).param_groups[0]["weight_decay"] == 0.0
    config = configured(optim="{optim_type: rmsprop, weight_decay: 0.1, args: {eps: 1e-5}}").optim
    group = build_optimizer(config, mlp()).param_groups[0]
    assert (group["weight_decay"], group["eps"]) == (0.1, 1e-5)


def with_gradients(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return [*parameters, nn.Parameter(torch.zeros(3))]  # the last one has no gradient


def gradients_of(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [p.grad.tolist() for p in parameters if p.grad is not None]


def clipped(clip: Clip, parameters: list[nn.Parameter]) -> torch.Tensor:
    norm = clip(parameters)
    assert norm is not None
    return norm


def test_norm_clip_scales_all_gradients_by_their_common_norm(configured) -> None:
    """The numbers of torch's clip_grad_norm_; the norm before it comes back."""
    clip = Clip(configured(optim="{clip_gradients: 2.5}").optim)
    mine, reference = with_gradients([3.0, 0.0], [4.0]), with_gradients([3.0, 0.0], [4.0])
    norm = clipped(clip, mine)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(reference, 2.5))
    assert norm.item() == 5.0
    assert gradients_of(mine) == gradients_of(reference)
    assert gradients_of(mine)[1] == pytest.approx([2.0])
    untouched = with_gradients([0.3, 0.4])
    assert clipped(clip, untouched).item() == pytest.approx(0.5)
    assert gradients_of(untouched) == [pytest.approx([0.3, 0.4])]


@pytest.mark.parametrize(
    ("mode", "inside", "weights"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("fp64", torch.float64, torch.float64),
    ],
)
def test_one_code_path_serves_every_mode(configured, mode: str, inside: torch.dtype, weights: torch.dtype) -> None:
    """The same calls; products in the mode's format, weights as they should be."""
    config = configured(precision=f"{{mode: {mode}}}", optim="{lr: 0.02}")
    precision = build_precision(config.precision, CPU)
    model = precision.cast(mlp())
    optimizer = build_optimizer(config.optim, model)
    batch = precision.cast_batch({"x": torch.randn(16, 4), "label": torch.arange(16), "name": ["a"]})
    target = batch["x"].sum(1, keepdim=True)
    losses, steps = [], 0
    for _ in range(25):
        optimizer.zero_grad()
        with precision.autocast():
            output = model(batch["x"])
            loss = (output.to(target.dtype) - target).square().mean()
        backward(precision, loss)
        precision.scaler.unscale_(optimizer)
        steps += precision.step(optimizer)
        losses.append(loss.item())
    assert steps == 25 or (mode == "fp16" and steps >= 20)  # the first loss scales may be too large
    assert output.dtype == inside
    assert next(model.parameters()).dtype == weights
    assert batch["label"].dtype == torch.int64
    assert losses[-1] < 0.7 * losses[0]
