"""Check CUDA kernels without a GPU: python -m tools.kernels_on_cpu NAME [SIZE ...] [--sanitize]

Compiles the .cu files of custom/ops for the CPU, where a wrong kernel can be found before there is
a GPU, and compares the operator with its reference; --sanitize does so with AddressSanitizer, then
with ThreadSanitizer.
"""

import sys
from pathlib import Path

from tools.kernels_on_cpu.run import run_on_cpu
from custom.ops.compare import load


def main(words: list[str]) -> int:
    """Compare. Returns the exit code."""
    if "--help" in words:
        print(__doc__)
        return 0
    sanitize = "--sanitize" in words
    words = [word for word in words if word != "--sanitize"]
    _, module, _ = load(words, "tools.kernels_on_cpu [--sanitize]")
    folder = Path(str(module.__file__)).parent
    return run_on_cpu(folder, ["-m", "tools.kernels_on_cpu.compare", *words], sanitize)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
