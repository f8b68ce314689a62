"""What the operators of a project must do on a device. In the project's folder: python ops_checks.py cpu|cuda|cuda:1

One program for the CPU and for GPUs, so that what is only seen to pass on a GPU is known to run.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from custom.ops import add_matrix, implementation, scale_exp
from custom.ops.compare import times
from torch import Tensor
from torch.testing import assert_close

Function = Callable[..., Any]
OPERATORS = torch.ops.custom_ops
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# On a GPU: more elements than one grid has threads, more rows and more columns than one grid has.
LARGE = {"cpu": [(65_537,), (70_001, 3), (3, 70_001)], "cuda": [(17_000_003,), (600_000, 2), (2, 2_200_000)]}


def saturate(x: Tensor) -> Tensor:
    """Return the operator with settings that all have an effect."""
    output: Tensor = scale_exp(x, -2.5, 0.75)
    return output


def saturate_eager(x: Tensor) -> Tensor:
    """Return the formula, independent of the project's own reference."""
    return -2.5 * torch.exp(-x) + 0.75


def agrees(operator: Function, formula: Function, *inputs: Tensor) -> None:
    """Values, gradients, dtype, device and layout of `operator` against the formula in float64, rounded once."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    output, expected = operator(*leaves), formula(*wide)
    upstream = torch.randn(output.shape, dtype=output.dtype, device=output.device)  # contiguous, whatever the output is
    gradients = torch.autograd.grad(output, leaves, upstream)
    expected_gradients = torch.autograd.grad(expected, wide, upstream.double())
    assert_close(output, expected.to(output.dtype))
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, right.to(gradient.dtype))
    assert (output.dtype, output.device) == (inputs[0].dtype, inputs[0].device)
    if operator is add_matrix:
        assert output.is_contiguous()
    else:
        assert output.stride() == torch.empty_like(inputs[0]).stride()


def shapes(device: str) -> None:
    """Every dtype; empty, one element, odd sizes, and sizes beyond one grid."""
    large = LARGE[torch.device(device).type]
    for dtype, shape in itertools.product(DTYPES, [(), (0,), (3, 0, 2), (1,), (7, 9, 11), *large]):
        agrees(saturate, saturate_eager, torch.randn(shape, dtype=dtype, device=device))
    for dtype, matrix in itertools.product(DTYPES, [(0, 5), (5, 0), (1, 1), (7, 9), (300, 701), *large[1:]]):
        a, b = torch.randn(2, *matrix, dtype=dtype, device=device)
        agrees(add_matrix, torch.add, a, b)


def layouts(device: str) -> None:
    """Transposed, with gaps, channels last, expanded, not aligned to more than one element, one input twice."""
    for dtype in DTYPES:
        x = torch.randn(6, 8, 10, 12, dtype=dtype, device=device)
        last = x.to(memory_format=torch.channels_last)
        for each in (x.mT, x[:, ::2, :, 1::3], last, x[:1, :1].expand_as(x), x.flatten()[1:], x[..., 0]):
            agrees(saturate, saturate_eager, each)
        a, b = torch.randn(2, 70, 90, dtype=dtype, device=device)
        pairs = [(a.T, b.T), (a, b.T.contiguous().T), (a[::2, 1::3], b[::2, 1::3]), (a[1:], b[:1].expand(69, 90))]
        for pair in pairs:
            agrees(add_matrix, torch.add, *pair)
        assert_close(add_matrix(a, a), a + a)


def special_values(device: str) -> None:
    """NaN, infinities, and values beyond the range."""
    for dtype in DTYPES:
        values = [float("nan"), float("inf"), -float("inf"), 1e4, -1e4, 0.0, -0.0, 88.0, -88.0]
        x = torch.tensor(values * 30, dtype=dtype, device=device)
        assert_close(saturate(x), saturate_eager(x.double()).to(dtype), equal_nan=True)
        assert_close(OPERATORS.scale_exp_backward(torch.ones_like(x), x, 1.0), -torch.exp(-x), equal_nan=True)


def derivatives(device: str) -> None:
    """First and second, against finite differences."""
    a, b = torch.randn(2, 3, 5, dtype=torch.float64, device=device)
    for function, inputs in ((saturate, [a]), (add_matrix, [a, b])):
        leaves = [each.detach().requires_grad_() for each in inputs]
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def registration(device: str) -> None:
    """PyTorch's own check: schema, fake kernel, autograd, compilation."""
    for dtype in (torch.float64, torch.float32):
        a, b = torch.randn(2, 3, 5, dtype=dtype, device=device)
        leaf = a.clone().requires_grad_()
        for tensor in (a, leaf, leaf.T):
            torch.library.opcheck(OPERATORS.scale_exp.default, (tensor, 2.0, 1.0))
            torch.library.opcheck(OPERATORS.scale_exp_backward.default, (torch.ones_like(tensor), tensor, 2.0))
        torch.library.opcheck(OPERATORS.add_matrix.default, (leaf, b))


def compiled(device: str) -> None:
    """No graph break, and the same values and gradients."""

    def model(a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(add_matrix(saturate(a.relu()), b))

    def expression(a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(saturate_eager(a.relu()) + b)

    a, b = torch.randn(2, 33, 65, device=device)
    agrees(torch.compile(model, fullgraph=True), expression, a, b)


def autocast(device: str) -> None:
    """Under autocast the output of a matrix product is half precision; where two dtypes meet, the wider one is used."""
    a, b = (each.requires_grad_() for each in torch.randn(2, 64, 64, device=device).unbind())

    def outputs(exp: Function, add: Function) -> tuple[Tensor, Tensor]:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            narrow = a @ b / 8
            return exp(narrow), add(narrow, b)

    mine, expected = outputs(saturate, add_matrix), outputs(saturate_eager, torch.add)
    assert [each.dtype for each in mine] == [torch.bfloat16, torch.float32]
    # The expression rounds to bfloat16 after each of its steps, and so is the less exact one.
    assert_close(mine[0].float(), expected[0].float(), rtol=0.05, atol=0.05)
    assert_close(mine[1], expected[1])
    for leaf in (a, b):
        (first,) = torch.autograd.grad(mine[1].sum(), leaf, retain_graph=True)
        (second,) = torch.autograd.grad(expected[1].sum(), leaf, retain_graph=True)
        assert_close(first, second)


@contextmanager
def late_stream(device: str) -> Iterator[None]:
    """A stream that is busy for a while and is not the default one; on the CPU everything is done in order."""
    if torch.device(device).type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: a kernel on another stream would be first
        yield
    stream.synchronize()


def current_stream(device: str) -> None:
    """Forward and backward wait for what was queued before them."""
    x = torch.zeros(1000, device=device, requires_grad=True)
    a = torch.zeros(20, 50, device=device)
    with late_stream(device):
        with torch.no_grad():
            x.fill_(1.0)
            a.fill_(3.0)
        output, total = saturate(x), add_matrix(a, a)
        (gradient,) = torch.autograd.grad(output.sum(), x)
    ones = torch.ones(1000, device=device)
    assert_close(output.detach(), saturate_eager(ones))
    assert_close(gradient, 2.5 * torch.exp(-ones))
    assert_close(total, torch.full_like(a, 6.0))


def refusals(device: str) -> None:
    """The kernels check by themselves what would make them read outside of an input."""
    a = torch.ones(2, 3, device=device)
    wrong = [
        (OPERATORS.add_matrix, (a, a[:1])),
        (OPERATORS.add_matrix, (a, a.half())),
        (OPERATORS.add_matrix, (a[0], a[0])),
        (OPERATORS.add_matrix, (a.long(), a.long())),
        (OPERATORS.scale_exp_backward, (a[:1], a, 1.0)),
        (OPERATORS.scale_exp_backward, (a.half(), a, 1.0)),
    ]
    if a.device.type == "cuda":
        wrong += [(OPERATORS.add_matrix, (a, a.cpu())), (OPERATORS.scale_exp_backward, (a.cpu(), a, 1.0))]
    if a.device.index:  # a second GPU
        wrong.append((OPERATORS.add_matrix, (a, a.to("cuda:0"))))
    for operator, arguments in wrong:
        with pytest.raises(RuntimeError, match=r"add_matrix|scale_exp_backward"):
            operator(*arguments)


def main(device: str) -> None:
    """Run every check, then print times."""
    kind = torch.device(device).type
    print(f"library: {implementation}")
    assert implementation.library is not None
    for name in ("add_matrix", "scale_exp", "scale_exp_backward"):
        key = kind.upper()
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"custom_ops::{name}", key), (name, key)
    current = torch.cuda.current_device() if kind == "cuda" else 0
    torch.manual_seed(0)
    checks = (
        shapes, layouts, special_values, derivatives, registration, compiled, autocast, current_stream, refusals,
    )  # fmt: skip
    for check in checks:
        check(device)
        print(f"passed: {check.__name__}", flush=True)
    if kind == "cuda":
        torch.cuda.synchronize(device)  # what failed late, fails here
        assert torch.cuda.current_device() == current, "an operator has changed the current device"
    size = 1 << (24 if kind == "cuda" else 17)
    print("times: scale_exp", times(saturate, saturate_eager, [torch.randn(size, device=device)]))
    matrices = [torch.randn(size >> 9, 512, device=device) for _ in range(2)]
    print("times: add_matrix", times(add_matrix, torch.add, matrices))


if __name__ == "__main__":
    main(sys.argv[1])
