"""The engine. Imported first, so that missing packages are reported here, in one line."""

import gc
import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).absolute().parents[1]
_NEEDED = ("torch", "numpy", "yaml", "pydantic", "loguru", "tqdm", "PIL")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _MISSING:
    print(
        f"error: {', '.join(_MISSING)}: not installed for this Python. Install: {sys.executable} -m pip install "
        f"-r '{_ROOT / 'requirements.txt'}'; or start with the Python that has them",
        file=sys.stderr,
    )
    sys.exit(2)


def import_large(package: str) -> None:
    """Import a package with the garbage collector off: its scans of so many objects take a fifth of a start."""
    enabled = gc.isenabled()
    gc.disable()
    importlib.import_module(package)
    if enabled:
        gc.enable()


_PROGRAM = Path(*sys.argv[:1])  # not a file with -c
if _PROGRAM.is_file() and _PROGRAM.absolute().parent == _ROOT:
    import_large("torch")
    gc.freeze()  # its objects stay for good
