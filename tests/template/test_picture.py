"""The pictures of the READMEs are what their script draws."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support import REPO, TEMPLATE

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ("mistakes.svg", "run.svg")


def texts_of(picture: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(picture).iter(f"{SVG}text")]


def check(folder: Path) -> None:
    """Three mistakes at once, an error with its line and a hint, the same bits after a kill."""
    mistakes, run = (texts_of(folder / name) for name in PICTURES)
    assert "error: The configuration has 3 problems:" in mistakes
    assert any(re.match(r"at +custom/models/my_model.py:14, in forward", text) for text in mistakes)
    assert any(re.match(r"hint +the model does not fit", text) for text in mistakes)
    assert any(text.startswith("$ kill -9 ") for text in run)
    assert any("this resume is bit-exact" in text for text in run)
    assert any(re.match(r"same: \d+ rows up to step 760, \d+ tensors", text) for text in run)
    assert any(re.match(r"\S+ INFO +eval +\d+/\d+ step .* Accuracy 0\.9", text) for text in run)
    assert not any("/tmp" in text for text in (*mistakes, *run))
    assert all((folder / name).stat().st_size < 150_000 for name in PICTURES)


def test_the_readmes_show_the_pictures() -> None:
    """Both open with one, and the project's has the other too. What they show can be read in them."""
    for folder in (REPO, TEMPLATE):
        page = (folder / "README.md").read_text(encoding="utf-8")
        assert re.search(r"^!\[[^]]+\]\(docs/(mistakes|run)\.svg\)$", page[:900], re.MULTILINE)
    for name in PICTURES:
        assert f"(docs/{name})" in page
        assert (REPO / "docs" / name).read_bytes() == (TEMPLATE / "docs" / name).read_bytes()
    check(REPO / "docs")


@pytest.mark.slow
@pytest.mark.full
def test_the_script_still_draws_them(tmp_path: Path) -> None:
    """From a rendered project: its real commands, and what they print."""
    done = subprocess.run([sys.executable, "tools/picture.py", str(tmp_path)], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(tmp_path)
