"""Time of the project's C++ operators on the CPU against the expression a user would write, eager and by torch.compile.

The library is built into a temporary folder. For each number of elements the three alternate within one process, some
calls at a time, and the ratio is that of their medians.  Run:  python bench/ops.py [--rounds N] [--threads N]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

import torch  # noqa: E402
from common.ops.build import build  # noqa: E402
from torch import Tensor  # noqa: E402

Function = Callable[..., Tensor]
CALLS_S = 0.002  # a round makes as many calls of each as take this long: short enough for a quiet moment


def eager_scale_exp(x: Tensor) -> Tensor:
    """Return the expression, as it would stand in a model."""
    return 2.0 * torch.exp(-x) + 1.0


def eager_add_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the expression, as it would stand in a model."""
    return a + b


def forward(function: Function, inputs: list[Tensor], upstream: Tensor) -> None:
    """What inference does."""
    with torch.no_grad():
        function(*inputs)


def both(function: Function, inputs: list[Tensor], upstream: Tensor) -> None:
    """What training does."""
    torch.autograd.grad(function(*inputs), inputs, upstream)


def seconds(work: Callable[[], None], calls: int) -> float:
    """Time of one call, of so many."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def medians(functions: list[Function], work: Callable[..., None], inputs: list[Tensor], rounds: int) -> list[float]:
    """Median time of a call of each function, in rounds that go through all of them."""
    upstream = torch.randn_like(inputs[0])
    calls = [lambda each=each: work(each, inputs, upstream) for each in functions]
    for call in calls:
        seconds(call, 5)  # compiles, and fills the caches
    counts = [max(1, int(CALLS_S / seconds(call, 5))) for call in calls]
    times = [[seconds(*pair) for pair in zip(calls, counts, strict=True)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def compare(name: str, operator: Function, expression: Function, count: int, rounds: int) -> None:
    """Print the lines of one operator for inputs of so many elements."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    number = expression.__code__.co_argcount
    inputs = [torch.randn(count // 100, 100, requires_grad=True) for _ in range(number)]
    functions = [operator, expression, torch.compile(expression, dynamic=False)]
    for what, work in (("forward", forward), ("forward + backward", both)):
        mine, eager, compiled = medians(functions, work, inputs, rounds)
        times = "".join(f"{each * 1e6:12.1f}" for each in (mine, eager, compiled))
        print(f"{name:<11}{what:<19}{count:>9,}{times}{eager / mine:11.2f}x{compiled / mine:11.2f}x", flush=True)


def main() -> None:
    """Build, measure, and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, default=1, help="more only on a machine of your own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OPS_BUILD_DIR=folder, FORCE_CUDA="0")
        build(PROJECT / "custom" / "ops")
        from custom.ops import add_matrix, implementation, scale_exp

        print(implementation)
        print(f"torch {torch.__version__}, float32, {options.rounds} rounds, {options.threads} thread(s)")
        columns = "".join(f"{name:>12}" for name in ("C++ us", "eager us", "compile us", "to eager", "to compile"))
        print(f"{'':<30}{'elements':>9}{columns}")
        for count in (10**3, 10**4, 10**5, 10**6, 10**7):
            compare("scale_exp", lambda x: scale_exp(x, 2.0, 1.0), eager_scale_exp, count, options.rounds)
        for count in (10**3, 10**4, 10**5, 10**6, 10**7):
            compare("add_matrix", add_matrix, eager_add_matrix, count, options.rounds)


if __name__ == "__main__":
    main()
