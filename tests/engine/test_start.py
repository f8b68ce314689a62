"""What a start costs: large packages are imported without a search for garbage meanwhile."""

import gc
import sys
from pathlib import Path

import pytest

from common import import_large


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_as_before(enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a large package is imported; afterwards as its owner wants it."""
    (tmp_path / "large.py").write_text("import gc\nseen = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        if not enabled:
            gc.disable()
        import_large("large")
        assert gc.isenabled() == enabled
        assert not sys.modules["large"].seen
    finally:
        gc.enable()
        sys.modules.pop("large", None)
