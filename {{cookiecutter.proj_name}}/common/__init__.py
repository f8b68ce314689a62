"""The engine. Imported before everything else, so that what is not installed is said here, in one line."""

import importlib.util
import sys
from pathlib import Path
from types import TracebackType


def _report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for a Ctrl-C while the imports run, which take seconds; any other error as usual."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted before the start", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _report_interrupt

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
