"""Pictures of what the model does."""

import numpy as np
import pytest
import torch

from parts.pictures.draw import to_rgb


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
