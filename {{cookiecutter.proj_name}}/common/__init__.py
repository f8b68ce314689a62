"""The engine. Imported before everything else, so that what is not installed is said here, in one line."""

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
