"""docs/features.md is what tools/features.py writes, and its pages are there."""

import re
import sys

from support import REPO, TEMPLATE

sys.path.insert(0, str(REPO / "tools"))
import features


def test_the_page_is_current() -> None:
    assert features.PAGE.read_text(encoding="utf-8") == features.text(), "python tools/features.py"


def test_its_pages_are_there() -> None:
    named = set(re.findall(r"\| ((?:docs/)?[\w/]+\.md) \|$", features.text(), re.MULTILINE))
    assert len(named) > 10
    assert [page for page in named if not (TEMPLATE / page).is_file()] == []
