"""What the READMEs show of a run is what a run shows."""

import re
from pathlib import Path

import pytest

from support import REPO, TEMPLATE

LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d \w+ +(?P<file>[\w/]+\.py):(?P<line>\d+) ", re.MULTILINE)


@pytest.mark.parametrize("readme", [REPO / "README.md", TEMPLATE / "README.md"], ids=["template", "project"])
def test_log_lines_come_from_where_they_say(readme: Path) -> None:
    """Each line of a log names the place that wrote it; an edit above that place moves it."""
    shown = [(found["file"], int(found["line"])) for found in LOG_LINE.finditer(readme.read_text(encoding="utf-8"))]
    assert shown
    for file, line in dict.fromkeys(shown):
        text = (TEMPLATE / file).read_text(encoding="utf-8").splitlines()[line - 1]
        assert "logger." in text or "self.monitor." in text, f"{file}:{line} is now {text!r}"
