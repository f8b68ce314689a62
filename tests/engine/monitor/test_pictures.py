"""Pictures of what the model does."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from common.monitor.pictures import progress_path, save_png, to_rgb


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
    """Grey or coloured, 0..1 or 0..255; what is outside is cut off, not wrapped around."""
    assert to_rgb(image).tolist() == np.full((4, 3, 3), 255).tolist()


def test_an_image_of_another_shape_is_refused():
    """Channels first is the usual mistake; the shape is named."""
    with pytest.raises(ValueError, match=r"\(3, 8, 8\)"):
        to_rgb(np.zeros((3, 8, 8)))


def test_picture_files_sort_by_step_and_stay_in_their_folder(tmp_path):
    """The listing is the order of training; a name cannot lead elsewhere."""
    steps = [(0, 5), (1, 40), (1, 100), (11, 1000), (2, 1000000)]
    paths = [progress_path(tmp_path, "val", "../a b/ü", epoch, step) for epoch, step in steps]
    assert [path.name for path in sorted(paths)] == [
        progress_path(tmp_path, "val", "x", *step).name for step in sorted(steps)
    ]
    assert {path.parent for path in paths} == {tmp_path / "val" / "a_b_ü"}
    save_png(paths[0], np.full((2, 2), 0.5))
    assert Image.open(paths[0]).getpixel((0, 0)) == (128, 128, 128)
    assert os.listdir(paths[0].parent) == [paths[0].name]
