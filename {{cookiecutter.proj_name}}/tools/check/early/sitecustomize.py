"""Python imports this when a run of tools.check starts, since its folder is in PYTHONPATH.

With CHECK_LISTING=reversed, folders are listed backwards: the order is arbitrary, and no result may depend on it.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

_list, _scan = os.listdir, os.scandir


class _Backwards(ExitStack):
    """The entries of a folder, as `os.scandir` returns them, the last one first."""

    def __init__(self, *where: Any) -> None:
        super().__init__()
        self.entries = reversed(list(_scan(*where)))

    def __iter__(self) -> Iterator[Any]:
        return self.entries

    def __next__(self) -> Any:
        return next(self.entries)


if os.environ.get("CHECK_LISTING") == "reversed":
    vars(os).update(listdir=lambda *where: _list(*where)[::-1], scandir=_Backwards)
