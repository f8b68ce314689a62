"""Build the operators in a folder: python -m common.ops FOLDER. What is current is left as it is.

FORCE_CUDA=1 compiles CUDA where there is no GPU, FORCE_CUDA=0 leaves it out, TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" names
the GPUs, CXX and CUDA_HOME the compilers, OPS_BUILD_DIR another folder for the library.
"""

import sys
from pathlib import Path

from common.ops.build import build
from common.ops.toolchain import BuildError


def main(arguments: list[str]) -> int:
    """Build, and print what was built. Returns the exit code."""
    is_folder = len(arguments) == 1 and Path(arguments[0], "src").is_dir()
    if not is_folder:
        print(f"{__doc__}\nFOLDER must have sources in src/, as custom/ops does.", file=sys.stderr)
        return 2
    try:
        print(build(Path(arguments[0])))
    except (BuildError, OSError) as error:
        print(f"error: {arguments[0]} was not built:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
