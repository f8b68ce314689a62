"""The engine. Imported first, so that missing packages are reported here, in one line."""

import gc
import importlib.util
import os
import sys
from pathlib import Path


def _open_closed_streams() -> None:
    """Connect standard input, output and error to /dev/null where the shell has closed them, as by `>&-`.

    Otherwise the next file to be opened, such as a checkpoint, would get the number of the closed one, and with it
    what libraries print.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


_open_closed_streams()


try:
    os.getcwd()
except FileNotFoundError:
    print("error: the working folder no longer exists; change to one that does", file=sys.stderr)
    sys.exit(2)


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
    # What torch's import makes, stays. Python would look through it for garbage several times: a fifth of a start.
    gc.disable()
    importlib.import_module("torch")
    gc.freeze()
    gc.enable()
