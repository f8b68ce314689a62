"""Each operator against its reference: values, gradients, strides, and all that PyTorch asks of an operator."""

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.conftest import ENVIRONMENT, PROJECT
from tests.ops.conftest import OPS
from tests.ops.test_operators import DTYPES, values
from custom.ops import add_matrix, scale_exp
from custom.ops.add_matrix import operator as add_operator
from custom.ops.compare import cases, difference
from custom.ops.saturating_model import SaturatingModel
from custom.ops.scale_exp import operator_backward
from custom.ops.scale_exp import reference as scale_reference

pytestmark = pytest.mark.usefixtures("build_dir")


@pytest.mark.slow
def test_numbers_at_the_edge() -> None:
    """Infinities and NaN stay what they are; nothing is computed by a fast approximation that loses them."""
    x = torch.tensor([0.0, -0.0, 88.0, -88.0, 104.0, -89.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan] * 7)
    for dtype in DTYPES:
        edge = x.to(dtype)
        torch.testing.assert_close(scale_exp(edge, 2.0, 1.0), scale_reference(edge, 2.0, 1.0), equal_nan=True)


@pytest.mark.slow
def test_other_derivatives_are_right() -> None:
    """Forward mode, once silently 0, and torch.func, once an error; in the step and inside torch.compile."""

    def formula(x: Tensor, y: Tensor) -> Tensor:
        return 1.5 * torch.exp(-(x + y)) - 0.5

    def function(x: Tensor, y: Tensor) -> Tensor:
        return scale_exp(add_matrix(x, y), 1.5, -0.5)

    x, y, v = (values(3, 4, seed=seed) for seed in (0, 1, 2))
    jvp, grad, hessian, vmap = (
        lambda f: torch.func.jvp(f, (x, y), (v, -2 * v)),
        lambda f: torch.func.grad(lambda a, b: f(a, b).sum())(x, y),
        lambda f: torch.func.hessian(lambda a: f(a, y).sum())(x),
        lambda f: torch.vmap(f)(x[None], y[None]),
    )
    for transform in (jvp, grad, hessian, vmap):
        torch.testing.assert_close(transform(function), transform(formula))
    compiled = torch.compile(lambda: jvp(function), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), jvp(formula))
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, v), y)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, -v * (formula(x, y) + 0.5))


@pytest.mark.slow
def test_exported() -> None:
    """The exported program holds the operator, and gives the same numbers, for another batch size too."""
    model = SaturatingModel(width=4).eval()
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(model, (torch.rand(3, 1, 8, 8),), dynamic_shapes=({0: size},))
    assert "custom_ops.scale_exp" in str(program.graph)
    image = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(image), model(image))


def test_autocast() -> None:
    """bfloat16 in, bfloat16 out; two dtypes become the wider one, as they do for PyTorch's own sums."""
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = linear(x)
        assert scale_exp(hidden).dtype == torch.bfloat16
        mixed = add_matrix(hidden, x)
    assert mixed.dtype == torch.float32
    mixed.sum().backward()
    assert linear.weight.grad is not None


def test_nothing_is_kept_without_need() -> None:
    """No tensor is saved where no gradient will be wanted, and no gradient computed that is not asked for."""
    kept: list[Tensor] = []
    x, y = values(3, 4).requires_grad_(), values(3, 4, seed=1)

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        with torch.no_grad():
            scale_exp(x)
        scale_exp(y)
        add_matrix(x, y)
        assert kept == []
        scale_exp(x)
        assert len(kept) == 1
    (gradient,) = torch.autograd.grad(add_matrix(x, y).sum(), x)
    assert torch.equal(gradient, torch.ones(3, 4, dtype=torch.float64))


def test_kernels_check_what_would_read_foreign_memory() -> None:
    """Also when the operator itself is called."""
    with pytest.raises(RuntimeError, match=r"size|match"):
        add_operator(values(3, 4), values(5, 4))
    with pytest.raises(RuntimeError, match=r"size|match|broadcast"):
        operator_backward(values(5), values(3), 1.0)


def test_a_module_that_uses_it_can_be_copied() -> None:
    """Pickled, as data loaders and process pools do it, and deep-copied, as averaged weights are."""
    model, image = SaturatingModel(width=4).eval(), torch.rand(2, 1, 8, 8)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(image), model(image))


def test_the_cases_show_what_one_tensor_hides() -> None:
    """A kernel that is right for contiguous tensors alone, values that nothing wrote, one precision, an error."""

    def wrong(x: Tensor, scale: float) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("wrong: not for Half\nmore")
        result = scale * x.clone(memory_format=torch.contiguous_format)
        if x.dtype == torch.float64:
            result = result * torch.where(x > 9, torch.nan, 1.0)
        return result.detach() * 2 - result if x.dtype == torch.bfloat16 else result

    x = torch.linspace(-1, 10, 12).view(3, 4)
    found = {}
    for name, arguments in cases(lambda *size: [x, 3.0], [(3, 4)], "cpu"):
        found[name] = difference(wrong, lambda x, scale: scale * x, arguments)
    assert len([text for text in found.values() if text]) == 4 + 4 + 4 - 1  # of float64, all whose last row is there
    values = found["float64 3 x 4 contiguous"]
    assert values.startswith("values: ") and "Mismatched elements: 1 / 12" in values
    assert found["bfloat16 3 x 4 contiguous"].startswith("gradient 1: ")
    assert found["float16 3 x 4 expanded"] == "wrong: not for Half"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("add_matrix", marks=pytest.mark.full), "scale_exp"])
def test_the_comparison(name: str, build_dir: str) -> None:
    """`python -m custom.ops.compare add_matrix 5 3`, for any size; it lists the operators without a name."""
    module = ["-m", f"{OPS.parent.name}.ops.compare"]
    environment = {**ENVIRONMENT, "PYTHONPATH": "", "OPS_BUILD_DIR": build_dir}

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    refused = start(*module)
    assert refused.returncode == 1 and "compare add_matrix|scale_exp [SIZE ...]" in refused.stderr
    is_built = bool(list(Path(build_dir).glob("*.so")))
    done = start(*module, name, "5", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}: ") and "(5, 3) torch.float32" in done.stdout
    assert ("C++ on the CPU" in done.stdout) == is_built
    assert ("there is no kernel to compare" in done.stdout) != is_built
    assert "  16 of 16 cases agree" in done.stdout
    assert re.search(r"backward: [\d.]+ ms, the reference [\d.]+ ms, speed-up [\d.]+\n$", done.stdout)


@pytest.mark.slow
@pytest.mark.skipif("OPS_BUILD_DIR" in os.environ, reason="this is the run that the test below starts")
@pytest.mark.full
def test_all_of_this_without_a_build(tmp_path: Path) -> None:
    """The same tests, and training, in a process where nothing is built: the reference holds all promises."""
    here = Path(__file__).parent
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*pytest_, str(here), "--ignore", str(here / "test_build.py"), "-k", "not processes and not same_with"],
        cwd=PROJECT, env={**ENVIRONMENT, "OPS_BUILD_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and " failed" not in done.stdout
