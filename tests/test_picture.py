"""The picture of the READMEs is what its script draws."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support import REPO, TEMPLATE


def test_both_readmes_open_with_the_picture() -> None:
    """It is small, it is the same file, and what it shows can be read in it."""
    for folder in (REPO, TEMPLATE):
        opening = (folder / "README.md").read_text(encoding="utf-8")[:900]
        assert re.search(r"^!\[[^]]+\]\(docs/run\.svg\)$", opening, re.MULTILINE)
    drawn = (REPO / "docs" / "run.svg").read_bytes()
    assert drawn == (TEMPLATE / "docs" / "run.svg").read_bytes()
    assert len(drawn) < 150_000
    texts = [element.text or "" for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "$ python train.py --config configs/default.yaml"
    assert any("Accuracy 0.9" in text for text in texts)
    assert not any("/tmp" in text for text in texts)
    assert any(re.fullmatch(r"29\d of 297 test images right", text) for text in texts)


@pytest.mark.slow
def test_the_script_still_draws_it(tmp_path: Path) -> None:
    """From a rendered project and a run of it, which is shorter here."""
    command = [sys.executable, "tools/picture.py", str(tmp_path), "--progress.epoch", "3", "--progress.epoch_eval", "1"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = ElementTree.parse(tmp_path / "run.svg")
    kinds = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    assert kinds.count("polyline") == 4  # two curves of the loss, two of the accuracy
    assert kinds.count("g") == 30  # three images of each digit
    texts = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any("epoch 3/3" in text for text in texts)
    assert "step 57" in texts
