"""Pictures with a frame and a text."""

import numpy as np
import pytest
import torch

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


def test_names_in_other_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is drawn by its number, and a text in plain letters."""
    assert (draw_labelled(np.zeros((8, 8)), "é 犬").image == draw_labelled(np.zeros((8, 8)), "e ?").image).all()
    task = ClassificationTask.__new__(ClassificationTask)
    task.__dict__["classes"] = ["猫", "犬"]
    output = {"prediction": torch.tensor([1]), "probability": torch.tensor([0.4])}
    texts: list[str] = []
    monkeypatch.setattr(classification_task, "draw_labelled", lambda image, text, **_: texts.append(text))
    task.pictures(output, {"image": torch.zeros(1, 1, 8, 8)}, 1)
    assert texts[0].startswith("1 (")
