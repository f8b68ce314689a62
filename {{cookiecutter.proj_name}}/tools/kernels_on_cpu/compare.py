"""Compare an operator's CUDA kernels, compiled for the CPU, with its reference; each case is announced before it runs.

A program of its own: a wrong kernel can end it. The announcement is then the last that it has said.
"""

import os
import sys
from collections.abc import Iterable, Iterator

import torch

from tools.kernels_on_cpu.run import CASE
from custom.ops.compare import SIZES, Case, cases, load, try_cases


def main(words: list[str]) -> int:
    """Compare. Returns the exit code: 1 if a case differs."""
    operator, module, size = load(words, "tools.kernels_on_cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN: what no thread writes shows
    torch.ops.load_library(os.environ["OPS_ON_CPU"])
    name = words[0]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"custom_ops::{name}", "CPU"):
        sys.exit(f'{name}: no .cu in src has m.impl("{name}", ...) for CUDA: a misspelt name is no error there')
    sizes = SIZES
    if size:
        sizes = (size,)
    tried = cases(module.example_inputs, sizes, "cpu")
    return int(try_cases(operator, module.reference, _announced(tried)) > 0)


def _announced(tried: Iterable[Case]) -> Iterator[Case]:
    for name, arguments in tried:
        print(f"{CASE}{name}", file=sys.stderr, flush=True)
        yield name, arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
