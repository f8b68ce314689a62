"""Optimizers, clipping and number formats, as a configuration asks for them."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.base.errors import UserError
from common.config import ConfigError, resolve
from common.optim import Clip, build_optimizer, needs_closure
from common.optim.groups import learning_rates
from common.optim.precision import build_precision
from tests.optim.test_optim import CPU, Root, backward, clipped, gradients_of, loss_of, mlp, with_gradients


@pytest.fixture
def configured(tmp_path: Path):
    def read(**sections: str) -> Root:
        path = tmp_path / "config.yaml"
        path.write_text("".join(f"{name}: {text}\n" for name, text in sections.items()))
        return resolve(Root, [path]).config

    return read


def test_muon_and_sparse_adam_train_what_they_are_for(configured) -> None:
    """The two special classes of torch.optim on parameters that suit them."""
    matrices = nn.Linear(4, 3, bias=False)
    muon = build_optimizer(configured(optim="{optim_type: Muon}").optim, matrices)
    matrices(torch.ones(2, 4)).sum().backward()
    muon.step()
    table = nn.Embedding(5, 3, sparse=True)
    before = table.weight.detach().clone()
    adam = build_optimizer(configured(optim="{optim_type: SparseAdam}").optim, nn.ModuleDict({"table": table}))
    table(torch.tensor([1])).sum().backward()
    adam.step()
    assert (table.weight != before).any(1).tolist() == [False, True, False, False, False]


def test_lbfgs_solves_and_is_the_only_one_that_needs_a_closure(configured) -> None:
    """LBFGS gets the closure it asks for."""
    config = configured(optim="{optim_type: lbfgs, lr: 1.0, args: {max_iter: 50, line_search_fn: strong_wolfe}}").optim
    model = mlp()
    optimizer = build_optimizer(config, model)
    assert needs_closure(optimizer)
    assert optimizer.param_groups[0]["max_iter"] == 50

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert loss_of(model).item() < 1e-3
    assert not needs_closure(build_optimizer(configured().optim, model))


def test_an_optimizer_by_import_path(configured) -> None:
    """`package.module.Class` and `package.module:Class`."""
    for path in ("torch.optim.adam.Adam", "torch.optim.adam:Adam"):
        optimizer = build_optimizer(configured(optim=f"{{optim_type: '{path}'}}").optim, mlp())
        assert type(optimizer) is torch.optim.Adam


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ("{optim_type: AdmW}", ["optim.optim_type", "AdmW", "did you mean AdamW"]),
        ("{optim_type: no.such.Adam}", ["optim.optim_type", "no.such"]),
        ("{optim_type: torch.nn.Linear}", ["optim.optim_type", "torch.nn.Linear", "Optimizer"]),
        ("{optim_type: RMSprop, args: {epsilon: 1e-5}}", ["optim.args", "epsilon", "did you mean eps"]),
        ("{args: {lr: 0.1}}", ["optim.args.lr", "remove this key"]),
        ("{args: {params: 1}}", ["optim.args.params", "remove this key"]),
        ("{args: {fuse: true, lr: 1}}", ["fuse", "args.lr"]),
        ("{optim_type: LBFGS, weight_decay: 0.1}", ["optim.weight_decay", "LBFGS", "set it to 0"]),
        ("{optim_type: Rprop, weight_decay: 0.1}", ["optim.weight_decay", "Rprop"]),
        ("{lr: 0}", ["optim.lr", "greater than 0"]),
        ("{accumulate: 0}", ["optim.accumulate"]),
        ("{clip_type: sum}", ["optim.clip_type", "norm", "value"]),
    ],
)
def test_mistakes_are_refused_before_anything_is_built(configured, optim: str, says: list[str]) -> None:
    """The message names the key, what was written, and the nearest right name."""
    with pytest.raises(ConfigError) as raised:
        configured(optim=optim)
    for words in says:
        assert words in str(raised.value)


def test_frozen_parameters_stay_out(configured) -> None:
    """The optimizer gets what requires a gradient, under its name; nothing to train is an error."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = build_optimizer(configured().optim, model)
    assert [group["param_names"] for group in optimizer.param_groups] == [["2.weight", "2.bias"]]
    assert learning_rates(optimizer) == {"all": 1e-3}
    model.requires_grad_(False)
    with pytest.raises(UserError, match="none of its 4 parameters"):
        build_optimizer(configured().optim, model)


def test_memory_order_never_reaches_a_fused_kernel_mixed(configured) -> None:
    """A state saved from channels-last weights continues on contiguous ones with the right numbers."""
    config = configured(optim="{lr: 0.1}").optim
    fused = configured(optim="{lr: 0.1, args: {fused: true}}").optim
    x = torch.randn(2, 3, 5, 5)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from the stubs
    saved_by = build_optimizer(config, last)
    steps(last, saved_by)
    contiguous = nn.Conv2d(3, 4, 3)
    contiguous.load_state_dict(last.state_dict())
    optimizer = build_optimizer(fused, contiguous)
    optimizer.load_state_dict(deepcopy(saved_by.state_dict()))  # as from a file, sharing no memory
    assert optimizer.param_groups[0]["fused"] is True
    steps(last, saved_by)
    steps(contiguous, optimizer)
    torch.testing.assert_close(contiguous.weight, last.weight.contiguous(), rtol=1e-4, atol=1e-5)


def test_value_clip_cuts_each_number(configured) -> None:
    """`clip_type: value`, the old behaviour."""
    parameters = with_gradients([3.0, -0.5], [-4.0])
    norm = clipped(Clip(configured(optim="{clip_gradients: 1.0, clip_type: value}").optim), parameters)
    assert gradients_of(parameters) == [[1.0, -0.5], [-1.0]]
    assert norm.item() == pytest.approx(math.sqrt(9 + 0.25 + 16))


def test_clipping_is_off_by_default_and_survives_no_gradients(configured) -> None:
    """A limit of 0 means none; without any gradient the norm is 0."""
    parameters = with_gradients([30.0])
    assert not Clip(configured().optim).is_active
    assert clipped(Clip(configured(optim="{clip_gradients: 1}").optim), parameters[1:]).item() == 0.0


def test_double_precision_reaches_into_nested_batches(configured) -> None:
    """fp64 casts floating point tensors wherever they are and leaves the rest."""
    cast = build_precision(configured(precision="{mode: fp64}").precision, CPU).cast_batch
    batch = cast({"a": [torch.ones(1), (torch.ones(1), 3)], "b": torch.ones(1, dtype=torch.bool), "c": None})
    assert batch["a"][0].dtype == batch["a"][1][0].dtype == torch.float64
    assert (batch["a"][1][1], batch["b"].dtype, batch["c"]) == (3, torch.bool, None)


@pytest.mark.parametrize("optim_type", ["SGD", "AdamW", "RMSprop"])
def test_fp16_unscales_before_the_clip_and_skips_an_infinite_step(configured, optim_type: str) -> None:
    """True-size gradients after `unscale`; an overflow skips the step and says so."""
    config = configured(precision="{mode: fp16}", optim=f"{{optim_type: {optim_type}}}")
    precision = build_precision(config.precision, CPU)
    model = mlp()
    optimizer = build_optimizer(config.optim, model)
    watched = next(model.parameters())
    [expected] = torch.autograd.grad(loss_of(model), [watched])
    backward(precision, loss_of(model))
    assert watched.grad is not None
    assert watched.grad.abs().max() > 1000 * expected.abs().max()
    precision.scaler.unscale_(optimizer)
    torch.testing.assert_close(watched.grad, expected)
    assert precision.step(optimizer)
    weight, scale = watched.detach().clone(), precision.state_dict()["scale"]
    optimizer.zero_grad()
    backward(precision, loss_of(model) * math.inf)
    precision.scaler.unscale_(optimizer)
    assert precision.step(optimizer) is False
    assert torch.equal(watched, weight)
    assert precision.state_dict()["scale"] == scale / 2
    optimizer.zero_grad()
    backward(precision, loss_of(model))
    precision.scaler.unscale_(optimizer)
    assert precision.step(optimizer) is True
    assert not torch.equal(watched, weight)


def test_the_loss_scale_survives_a_save(configured, tmp_path: Path) -> None:
    """The scaler's state is plain, loads safely, and continues; other modes have none and ignore it."""
    config = configured(precision="{mode: fp16}")
    model = mlp()
    optimizer = build_optimizer(config.optim, model)

    def overflow(precision: Any) -> None:
        backward(precision, loss_of(model) * math.inf)
        precision.scaler.unscale_(optimizer)
        assert not precision.step(optimizer)

    first = build_precision(config.precision, CPU)
    overflow(first)
    torch.save(first.state_dict(), tmp_path / "scaler.pt")
    state = torch.load(tmp_path / "scaler.pt", weights_only=True)
    second = build_precision(config.precision, CPU)
    second.load_state_dict(state)
    overflow(second)
    assert second.state_dict()["scale"] == state["scale"] / 2
    second.load_state_dict({**state, "scale": 2.0**17})  # grown above the first scale
    overflow(second)
    second.load_state_dict({})  # the run before had no scaler
    plain = build_precision(configured().precision, CPU)
    plain.load_state_dict(state)
    assert plain.state_dict() == {}


def test_modes_without_scaler_ask_the_device_nothing(configured) -> None:
    """fp32, bf16 and fp64 steps read no value back; meta tensors have none to give."""
    for mode in ("fp32", "bf16", "fp64"):
        config = configured(precision=f"{{mode: {mode}}}", optim="{clip_gradients: 1.0}")
        precision = build_precision(config.precision, CPU)
        with torch.device("meta"):
            model = precision.cast(nn.Linear(4, 2))
        optimizer = build_optimizer(config.optim, model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert clipped(Clip(config.optim), list(model.parameters())).device.type == "meta"
        assert precision.step(optimizer) is True


def test_autocast_contexts_nest(configured) -> None:
    """Evaluation may run inside a training step."""
    precision = build_precision(configured(precision="{mode: bf16}").precision, CPU)
    with precision.autocast():
        with precision.autocast():
            pass
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_tf32_is_left_alone_unless_asked(configured) -> None:
    """Null keeps torch's switches, true and false set them, and torch can still read all of them."""

    def switches() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    found = switches()
    try:
        build_precision(configured(precision="{tf32: null}").precision, CPU)
        assert switches() == found
        build_precision(configured(precision="{tf32: true}").precision, CPU)
        assert switches() == ("high", True)
        build_precision(configured(precision="{tf32: false}").precision, CPU)
        assert switches() == ("highest", False)
    finally:
        build_precision(configured(precision=f"{{tf32: {str(found[1]).lower()}}}").precision, CPU)
        torch.set_float32_matmul_precision(found[0])
