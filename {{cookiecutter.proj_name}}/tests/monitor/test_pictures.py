"""Pictures of what the model does."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from common.monitor.pictures import labelled, progress_path, save_png, to_rgb


@pytest.mark.parametrize(
    "image",
    [
        np.full((4, 3), 1.0),
        np.full((4, 3, 1), 255, np.uint8),
        np.full((4, 3, 3), 2.0, np.float32),
        torch.ones(4, 3, 4),
        np.full((4, 3), 300),
    ],
)
def test_images_of_every_kind_become_rgb(image):
    """CT-59: grey or coloured, 0..1 or 0..255; what is outside is cut off, not wrapped around."""
    assert to_rgb(image).tolist() == np.full((4, 3, 3), 255).tolist()


def test_an_image_of_another_shape_is_refused():
    """CT-59: channels first is the usual mistake; the shape is named."""
    with pytest.raises(ValueError, match=r"\(3, 8, 8\)"):
        to_rgb(np.zeros((3, 8, 8)))


def test_a_labelled_picture_shows_image_frame_and_text():
    """CT-59: the frame tells right from wrong, the text is below, and a digit of 8 x 8 is large enough to see."""
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


def test_picture_files_sort_by_step_and_stay_in_their_folder(tmp_path):
    """CT-59: the listing is the order of training; a name cannot lead elsewhere."""
    steps = [(0, 5), (1, 40), (1, 100), (11, 1000), (2, 1000000)]
    paths = [progress_path(tmp_path, "val", "../a b/ü", epoch, step) for epoch, step in steps]
    assert [path.name for path in sorted(paths)] == [
        progress_path(tmp_path, "val", "x", *step).name for step in sorted(steps)
    ]
    assert {path.parent for path in paths} == {tmp_path / "val" / "a_b_ü"}
    save_png(paths[0], np.full((2, 2), 0.5))
    assert Image.open(paths[0]).getpixel((0, 0)) == (128, 128, 128)
    assert os.listdir(paths[0].parent) == [paths[0].name]
