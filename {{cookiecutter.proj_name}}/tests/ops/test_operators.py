"""Each operator against its reference: values, gradients, strides, and all that PyTorch asks of an operator."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.conftest import ENVIRONMENT, PROJECT
from tests.ops.conftest import OPS, has_compiler
from custom.ops import add_matrix, scale_exp
from custom.ops.add_matrix import operator as add_operator
from custom.ops.add_matrix import reference as add_reference
from custom.ops.compare import compare
from custom.ops.saturating_model import SaturatingModel
from custom.ops.scale_exp import operator as scale_operator
from custom.ops.scale_exp import operator_backward, reference_backward
from custom.ops.scale_exp import reference as scale_reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("build_dir")


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# What a tensor can look like in memory. Matrices come first; add_matrix takes no other.
LAYOUTS: dict[str, Callable[[torch.dtype, int], Tensor]] = {
    "matrix": lambda dtype, seed: values(3, 5, dtype=dtype, seed=seed),
    "one": lambda dtype, seed: values(1, 1, dtype=dtype, seed=seed),
    "empty": lambda dtype, seed: values(0, 7, dtype=dtype, seed=seed),
    "odd and large": lambda dtype, seed: values(257, 1031, dtype=dtype, seed=seed),
    "transposed": lambda dtype, seed: values(6, 4, dtype=dtype, seed=seed).t(),
    "sliced": lambda dtype, seed: values(8, 10, dtype=dtype, seed=seed)[::2, 1::3],
    "expanded": lambda dtype, seed: values(1, 5, dtype=dtype, seed=seed).expand(4, 5),
    "number": lambda dtype, seed: values(dtype=dtype, seed=seed),
    "channels last": lambda dtype, seed: values(2, 3, 4, 5, dtype=dtype, seed=seed).to(
        memory_format=torch.channels_last
    ),
    "permuted": lambda dtype, seed: values(2, 3, 4, dtype=dtype, seed=seed).permute(2, 0, 1),
}
MATRICES = list(LAYOUTS)[:7]


def agree(
    operator: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor, settings: Any = ()
) -> None:
    """The same values, strides and gradients."""
    found = []
    for function in (operator, reference):
        leaves = [each.clone(memory_format=torch.preserve_format).requires_grad_() for each in inputs]
        plain = function(*inputs, *settings)
        output = function(*leaves, *settings)
        assert torch.equal(output, plain)
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
        found.append((plain, *gradients))
    for one, other in zip(*found, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_exp_is_its_reference(layout: str, dtype: torch.dtype) -> None:
    """CT-63, CT-70: values and gradients, whatever the shape, the strides and the precision."""
    x = LAYOUTS[layout](dtype, 0)
    agree(scale_exp, scale_reference, x, settings=(-1.5, 0.25))
    expanded = torch.ones((), dtype=dtype).expand(x.shape)  # as the gradient of a sum is
    for grad in (LAYOUTS[layout](dtype, 1), expanded):
        torch.testing.assert_close(operator_backward(grad, x, 2.0), reference_backward(grad, x, 2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", MATRICES)
def test_add_matrix_is_its_reference(layout: str, dtype: torch.dtype) -> None:
    """CT-62, CT-70: also where the two matrices lie differently in memory."""
    a, b = LAYOUTS[layout](dtype, 0), LAYOUTS[layout](dtype, 1)
    agree(add_matrix, add_reference, a, b)
    agree(add_matrix, add_reference, a, b.t().contiguous().t())
    agree(add_matrix, add_reference, a, a)


def test_numbers_at_the_edge() -> None:
    """D-54: infinities and NaN stay what they are; nothing is computed by a fast approximation that loses them."""
    x = torch.tensor([0.0, -0.0, 88.0, -88.0, 104.0, -89.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan] * 7)
    for dtype in DTYPES:
        edge = x.to(dtype)
        torch.testing.assert_close(scale_exp(edge, 2.0, 1.0), scale_reference(edge, 2.0, 1.0), equal_nan=True)


@pytest.mark.parametrize("layout", ["matrix", "transposed", "sliced", "empty"])
def test_gradients_are_derivatives(layout: str) -> None:
    """CT-70: first and second derivatives against finite differences, in float64."""
    x, y = (LAYOUTS[layout](torch.float64, seed).requires_grad_() for seed in (0, 1))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda each: scale_exp(each, 1.5, -0.5), (x,))
        assert check(add_matrix, (x, y))
    assert torch.autograd.gradcheck(lambda grad, each: operator_backward(grad, each, 1.5), (y, x))


def test_other_derivatives_are_right() -> None:
    """CT-70: forward mode, once silently 0, and torch.func, once an error; in the step and inside torch.compile."""

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["matrix", "transposed", "sliced", "expanded", "empty"])
def test_pytorch_finds_nothing_wrong(layout: str, dtype: torch.dtype) -> None:
    """CT-63: schema, registration of the gradient, shapes without data, and tracing, as PyTorch itself checks them."""
    x, y = (LAYOUTS[layout](dtype, seed).clone(memory_format=torch.preserve_format) for seed in (0, 1))
    torch.library.opcheck(scale_operator, (x.requires_grad_(), 2.0, 1.0))
    torch.library.opcheck(add_operator, (x, y.requires_grad_()))
    torch.library.opcheck(operator_backward, (y, x, 2.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_break(backend: str) -> None:
    """CT-63: torch.compile with fullgraph fails at the first thing it cannot trace."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        return scale_exp(add_matrix(a, b), -1.0, 1.0).sin().sum()

    a, b = values(6, 5), values(6, 5, seed=1)
    results = []
    for each in (torch.compile(function, fullgraph=True, backend=backend), function):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        result = each(*leaves)
        results.append((result.detach(), *torch.autograd.grad(result, leaves)))
    torch.testing.assert_close(*results)


def test_exported() -> None:
    """CT-63: the exported program holds the operator, and gives the same numbers, for another batch size too."""
    model = SaturatingModel(width=4).eval()
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(model, (torch.rand(3, 1, 8, 8),), dynamic_shapes=({0: size},))
    assert "custom_ops.scale_exp" in str(program.graph)
    image = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(image), model(image))


def test_autocast() -> None:
    """CT-63: bfloat16 in, bfloat16 out; two dtypes become the wider one, as they do for PyTorch's own sums."""
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
    """CT-71: no tensor is saved where no gradient will be wanted, and no gradient computed that is not asked for."""
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: scale_exp(torch.arange(3)), "not torch.int64"),
        (lambda: scale_exp(torch.zeros(3, dtype=torch.complex64)), "not torch.complex64"),
        (lambda: scale_exp(values(3), scale=torch.ones(())), "scale must be a number, not Tensor"),
        (lambda: scale_exp(values(3), shift="1"), "shift must be a number, not str"),
        (lambda: add_matrix(values(3, 4), values(1, 4)), r"not \(3, 4\) and \(1, 4\)"),
        (lambda: add_matrix(values(3), values(3)), r"not \(3,\) and \(3,\)"),
        (lambda: add_matrix(values(2, 2), values(2, 2, dtype=torch.float32)), "not torch.float64 and torch.float32"),
        (lambda: add_matrix(torch.ones(2, 2).int(), torch.ones(2, 2).int()), "not torch.int32"),
        (lambda: add_matrix(values(2, 2), values(2, 2).to("meta")), "one device, not cpu and meta"),
    ],
)
def test_bad_input(call: Callable[[], Any], words: str) -> None:
    """D-54: refused in Python, before any kernel starts, with the value and the rule."""
    with pytest.raises(ValueError, match=words):
        call()


def test_kernels_check_what_would_read_foreign_memory() -> None:
    """D-54: also when the operator itself is called."""
    with pytest.raises(RuntimeError, match=r"size|match"):
        add_operator(values(3, 4), values(5, 4))
    with pytest.raises(RuntimeError, match=r"size|match|broadcast"):
        operator_backward(values(5), values(3), 1.0)


def test_a_module_that_uses_it_can_be_copied() -> None:
    """CT-63: pickled, as data loaders and process pools do it, and deep-copied, as averaged weights are."""
    model, image = SaturatingModel(width=4).eval(), torch.rand(2, 1, 8, 8)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(image), model(image))


def test_compare_shows_a_wrong_kernel() -> None:
    """CT-70: what the two scripts print: differences, times, and finite differences; for any number of elements."""
    table = compare(scale_exp, scale_reference, [values(4, 3, dtype=torch.float32)], scale=2.0, shift=1.0)
    assert "(4, 3) float32 on cpu" in table and "gradcheck: passed" in table
    values_row = next(line for line in table.splitlines() if line.startswith("  values"))
    assert float(values_row.split()[1]) < 1e-5 and values_row.endswith("x")
    wrong = compare(lambda x: scale_exp(x) + 1, lambda x: scale_reference(x, 1.0, 0.0), [values(2, 2)])
    assert "1.0e+00" in wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_matrix", "scale_exp"])
def test_the_comparison(name: str, build_dir: str) -> None:
    """CT-70, D-55: `python -m custom.ops.compare add_matrix 5 3`, for any size; without a name it lists them."""
    command = [sys.executable, "-m", f"{OPS.parent.name}.ops.compare"]
    environment = {**ENVIRONMENT, "PYTHONPATH": "", "OPS_BUILD_DIR": build_dir}
    done, refused = (
        subprocess.run(
            [*command, *words], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        for words in ([name, "5", "3"], [])
    )
    assert refused.returncode == 1 and "compare add_matrix|scale_exp [SIZE ...]" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}: ") and "(5, 3) float32" in done.stdout
    assert ("C++ on the CPU" in done.stdout) == bool(list(Path(build_dir).glob("*.so")))
    assert done.stdout.endswith("gradcheck: passed\n")


def test_which_kernels_run(build_dir: str) -> None:
    """XP-02: the compiled ones, if there are any; this test says which all others have used."""
    built = bool(list(Path(build_dir).glob("*.so")))
    for name in ("add_matrix", "scale_exp", "scale_exp_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"custom_ops::{name}", "CPU") == built


@pytest.mark.slow
@pytest.mark.skipif("OPS_BUILD_DIR" in os.environ, reason="this is the run that the test below starts")
def test_all_of_this_without_a_build(tmp_path: Path) -> None:
    """XP-02: the same tests, and training, in a process where nothing is built: the reference holds all promises."""
    here = Path(__file__).parent
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*pytest_, str(here), "--ignore", str(here / "test_build.py"), "-k", "not processes and not same_with"],
        cwd=PROJECT, env={**ENVIRONMENT, "OPS_BUILD_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and " failed" not in done.stdout


@pytest.mark.skipif("OPS_BUILD_DIR" in os.environ, reason="without a build, in the run above")
def test_the_build_is_tested_where_there_is_a_compiler(build_dir: str) -> None:
    """XP-02: else the tests above would pass on the reference alone, and say nothing of the kernels."""
    assert has_compiler() == bool(list(Path(build_dir).glob("*.so")))
