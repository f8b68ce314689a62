"""The engine. Imported first, so that missing packages are reported here, in one line."""

import gc
import importlib.util
import sys
from pathlib import Path

_NEEDED = ("torch", "numpy", "yaml", "pydantic", "loguru", "tqdm", "PIL")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _MISSING:
    _FILE = Path(__file__).resolve().parents[1] / "requirements.txt"
    print(
        f"error: {', '.join(_MISSING)}: not installed for this Python. Install: {sys.executable} -m pip install "
        f"-r '{_FILE}'; or start with the Python that has them",
        file=sys.stderr,
    )
    sys.exit(2)

_PROGRAM = Path(*sys.argv[:1])  # not a file with -c
if _PROGRAM.is_file() and _PROGRAM.absolute().parent == Path(__file__).absolute().parents[1]:
    # The objects that torch's import makes stay for good. To look through them for garbage, several times, takes a
    # fifth of a start.
    gc.disable()
    importlib.import_module("torch")
    gc.freeze()
    gc.enable()
