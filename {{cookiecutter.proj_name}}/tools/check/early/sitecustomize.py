"""Python imports this when a run of tools.check starts, since its folder is in PYTHONPATH.

With CHECK_LISTING=reversed, folders are listed backwards: the order is arbitrary, and no result may depend on it.
"""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

_list, _scan = os.listdir, os.scandir
_others = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]
if (_spec := PathFinder.find_spec("sitecustomize", _others)) and _spec.loader:  # the environment's own
    _spec.loader.exec_module(module_from_spec(_spec))


class _Backwards:
    """The entries of a folder, as `os.scandir` returns them, the last one first."""

    def __init__(self, *where: Any) -> None:
        with _scan(*where) as entries:
            self.entries = reversed(list(entries))

    def __iter__(self) -> Iterator[Any]:
        return self.entries

    def __next__(self) -> Any:
        return next(self.entries)

    def __enter__(self) -> "_Backwards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing left to close."""


if os.environ.get("CHECK_LISTING") == "reversed":
    vars(os).update(listdir=lambda *where: _list(*where)[::-1], scandir=_Backwards)
