"""Pictures with a frame and a text."""

import numpy as np

from custom.tasks.labelled import labelled


def test_a_labelled_picture_shows_image_frame_and_text():
    """CT-59: the frame is green or red, the text is below, and a digit of 8 x 8 is large enough to see."""
    image = np.zeros((8, 8))
    image[2, 3] = 1.0
    right = labelled(image, "3 -> 3", ok=True).image
    wrong = labelled(image, "3 -> 5", ok=False).image
    assert right.shape == wrong.shape
    assert min(right.shape[:2]) >= 100
    middle = right.shape[1] // 2
    assert right[1, middle].argmax() == 1
    assert wrong[1, middle].argmax() == 0
    assert (right == 255).all(axis=2)[4:116].sum() == 14 * 14  # one pixel, fourteen times as large, in the frame
    assert (right[-20:] != wrong[-20:]).any()
    assert (labelled(image, "").image.shape[0]) < right.shape[0]


def test_any_text_can_be_drawn():
    """CT-59: a long one makes the picture wider; letters the font does not have do not stop a run."""
    narrow, wide = labelled(np.zeros((8, 8)), "a"), labelled(np.zeros((8, 8)), "é→ 漢字 " + "long " * 20)
    assert wide.image.shape[1] > 2 * narrow.image.shape[1]
    assert (labelled(np.zeros((8, 8)), "é 漢").image == labelled(np.zeros((8, 8)), "e ").image).all()
