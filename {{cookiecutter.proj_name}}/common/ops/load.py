"""Load the compiled kernels of a folder of operators, if they are built and current."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from loguru import logger

from common.config import place
from common.ops.library import find

HOW_TO_BUILD = "sh scripts/install_ops.sh"


@dataclass(frozen=True)
class Implementation:
    """The implementation that runs when an operator is called. `str()` of it is for the log."""

    library: Path | None = None
    architectures: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.library is None:
            return f"Python reference ({self.reason}; {HOW_TO_BUILD} builds the C++ and CUDA kernels)"
        gpu = f"CUDA for {', '.join(self.architectures)}" if self.architectures else "Python reference"
        return f"C++ on the CPU, {gpu} on a GPU ({place(self.library)})"


@cache
def load(folder: Path) -> Implementation:
    """Load the library of the operators in `folder`, once; without a current one, their Python references run.

    A library that is out of date is never loaded: a warning names what has changed, and the command to build.
    """
    import torch  # imported here, since building does not need it

    found = find(folder)
    if isinstance(found, str):
        if found != "nothing is built":
            logger.warning("{}: {}; the Python reference runs. To build: {}", place(folder), found, HOW_TO_BUILD)
        return Implementation(reason=found)
    path, record = found
    try:
        torch.ops.load_library(path)
    except OSError as error:
        logger.warning("{}: {} cannot be loaded; the Python reference runs: {}", place(folder), path.name, error)
        return Implementation(reason="the built library cannot be loaded")
    return Implementation(path, tuple(record.architectures))
