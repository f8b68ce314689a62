"""Pictures with a frame and a text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.monitor import fonts
from common.monitor.labelled import draw_labelled
from custom.tasks import classification_task
from custom.tasks.classification_task import ClassificationTask


def test_a_labelled_picture_shows_image_frame_and_text():
    """The frame is green or red, the text is below, and a digit of 8 x 8 is large enough to see."""
    image = np.zeros((8, 8))
    image[2, 3] = 1.0
    right = draw_labelled(image, "3 -> 3", ok=True).image
    wrong = draw_labelled(image, "3 -> 5", ok=False).image
    assert right.shape == wrong.shape
    assert min(right.shape[:2]) >= 100
    middle = right.shape[1] // 2
    assert right[1, middle].argmax() == 1
    assert wrong[1, middle].argmax() == 0
    assert (right == 255).all(axis=2)[4:116].sum() == 14 * 14  # one pixel, fourteen times as large, in the frame
    assert (right[-20:] != wrong[-20:]).any()
    assert (draw_labelled(image, "").image.shape[0]) < right.shape[0]


BDF = """STARTFONT 2.1
FONT -a-own-medium-r-normal--16-160-75-75-c-160-iso10646-1
SIZE 16 75 75
FONTBOUNDINGBOX 16 16 0 0
STARTPROPERTIES 5
PIXEL_SIZE 16
CHARSET_REGISTRY "ISO10646"
CHARSET_ENCODING "1"
FONT_ASCENT 16
FONT_DESCENT 0
ENDPROPERTIES
CHARS 2
{}ENDFONT
"""
GLYPH = "STARTCHAR c{0}\nENCODING {0}\nSWIDTH 500 0\nDWIDTH 16 0\nBBX 16 16 0 0\nBITMAP\n{1}\nENDCHAR\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A system with one font, which has one character: a cat, drawn as a black square."""
    glyphs = GLYPH.format(0, "\n".join(["8001"] * 16)) + GLYPH.format(ord("猫"), "\n".join(["FFFF"] * 16))
    (tmp_path / "own.ttf").write_text(BDF.format(glyphs))
    monkeypatch.setattr(fonts, "FOLDERS", (str(tmp_path),))
    for cached in (fonts._files, fonts._file_with):
        cached.cache_clear()
    yield tmp_path
    for cached in (fonts._files, fonts._file_with):
        cached.cache_clear()


def test_names_in_any_script_are_drawn(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a font of the system that has them; otherwise a class is drawn by its number, and a text in plain letters."""
    narrow, wide = draw_labelled(np.zeros((8, 8)), "a"), draw_labelled(np.zeros((8, 8)), "é→ 漢字 " + "long " * 20)
    assert wide.image.shape[1] > 2 * narrow.image.shape[1]
    cat = draw_labelled(np.zeros((8, 8)), "猫").image
    assert (cat[-27:, cat.shape[1] // 2] < 60).all(axis=1).sum() >= 14  # the square
    assert (draw_labelled(np.zeros((8, 8)), "é 犬").image == draw_labelled(np.zeros((8, 8)), "e ?").image).all()
    task = ClassificationTask.__new__(ClassificationTask)
    task.__dict__["classes"] = ["猫", "犬"]
    output = {"prediction": torch.tensor([1]), "probability": torch.tensor([0.4])}
    texts: list[str] = []
    monkeypatch.setattr(classification_task, "draw_labelled", lambda image, text, **_: texts.append(text))
    task.pictures(output, {"image": torch.zeros(1, 1, 8, 8)}, 1)
    assert texts[0].startswith("1 (")
