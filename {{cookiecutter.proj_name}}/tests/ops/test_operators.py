"""Each operator against its reference: values, gradients, strides, and all that PyTorch asks of an operator."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops.toolchain import find_compiler
from custom.ops import add_matrix, scale_exp
from custom.ops.add_matrix import operator as add_operator
from custom.ops.add_matrix import reference as add_reference
from custom.ops.scale_exp import operator as scale_operator
from custom.ops.scale_exp import operator_backward, reference_backward
from custom.ops.scale_exp import reference as scale_reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
pytestmark = pytest.mark.usefixtures("build_dir")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where `values` are: on the CPU, then on a GPU if there is one."""
    with torch.device(request.param):
        yield request.param


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


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
    """Check for the same values, strides and gradients."""
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
@pytest.mark.usefixtures("device")
def test_scale_exp_is_its_reference(layout: str, dtype: torch.dtype) -> None:
    """Values and gradients, whatever the shape, the strides and the precision."""
    x = LAYOUTS[layout](dtype, 0)
    agree(scale_exp, scale_reference, x, settings=(-1.5, 0.25))
    expanded = torch.ones((), dtype=dtype).expand(x.shape)  # as the gradient of a sum is
    for grad in (LAYOUTS[layout](dtype, 1), expanded):
        torch.testing.assert_close(operator_backward(grad, x, 2.0), reference_backward(grad, x, 2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.usefixtures("device")
def test_add_matrix_is_its_reference(layout: str, dtype: torch.dtype) -> None:
    """Also where the two matrices lie differently in memory."""
    a, b = LAYOUTS[layout](dtype, 0), LAYOUTS[layout](dtype, 1)
    agree(add_matrix, add_reference, a, b)
    agree(add_matrix, add_reference, a, b.t().contiguous().t())
    agree(add_matrix, add_reference, a, a)


@pytest.mark.parametrize("layout", ["matrix", "transposed", "sliced", "empty"])
@pytest.mark.usefixtures("device")
def test_gradients_are_derivatives(layout: str) -> None:
    """First and second derivatives against finite differences, in float64."""
    x, y = (LAYOUTS[layout](torch.float64, seed).requires_grad_() for seed in (0, 1))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda each: scale_exp(each, 1.5, -0.5), (x,))
        assert check(add_matrix, (x, y))
    assert torch.autograd.gradcheck(lambda grad, each: operator_backward(grad, each, 1.5), (y, x))


@pytest.mark.parametrize("layout", ["matrix", "transposed", "sliced", "expanded", "empty"])
@pytest.mark.usefixtures("device")
def test_pytorch_finds_nothing_wrong(layout: str) -> None:
    """Schema, registration of the gradient, shapes without data, and tracing, as PyTorch itself checks them."""
    x, y = (LAYOUTS[layout](torch.float32, seed).clone(memory_format=torch.preserve_format) for seed in (0, 1))
    torch.library.opcheck(scale_operator, (x.requires_grad_(), 2.0, 1.0))
    torch.library.opcheck(add_operator, (x, y.requires_grad_()))
    torch.library.opcheck(operator_backward, (y, x, 2.0))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("device")
def test_compiled_without_a_break(backend: str) -> None:
    """torch.compile with fullgraph fails at the first thing it cannot trace."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        return scale_exp(add_matrix(a, b), -1.0, 1.0).sin().sum()

    a, b = values(6, 5), values(6, 5, seed=1)
    results = []
    for each in (torch.compile(function, fullgraph=True, backend=backend), function):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        result = each(*leaves)
        results.append((result.detach(), *torch.autograd.grad(result, leaves)))
    torch.testing.assert_close(*results)


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
    """Refused in Python, before any kernel starts, with the value and the rule."""
    with pytest.raises(ValueError, match=words):
        call()


def test_which_kernels_run(build_dir: str) -> None:
    """The compiled ones, if there are any; this test says which all others have used."""
    built = {"CPU": False, "CUDA": False}
    for library in Path(build_dir).glob("*.so"):
        built = {"CPU": True, "CUDA": library.stem.count("-") > 1}  # architectures follow the checksum
    for name in ("add_matrix", "scale_exp", "scale_exp_backward"):
        for key, is_built in built.items():
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"custom_ops::{name}", key) == is_built


@pytest.mark.skipif("OPS_BUILD_DIR" in os.environ, reason="without a build, in the run above")
def test_the_build_is_tested_where_there_is_a_compiler(build_dir: str) -> None:
    """Else the tests above would pass on the reference alone, and say nothing of the kernels."""
    assert (find_compiler() is not None) == bool(list(Path(build_dir).glob("*.so")))
