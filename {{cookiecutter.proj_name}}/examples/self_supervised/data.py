"""Two random views of each digit."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from examples.digits import load_digits


class TwoViews:
    """A digit, and two versions of it: rotated, scaled, moved, of another contrast, with noise.

    Args:
        strength: of the changes; 0 for none, 1 for rotations up to 30 degrees, and so on.
    """

    random = True

    def __init__(self, data_dir: Path, mode: str, strength: float = 1.0) -> None:
        self.images, self.labels = load_digits(data_dir, mode)
        self.strength = strength

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`image`, `first` and `second` (1, 8, 8), float in about 0..1; `label`, int64 scalar, is for metrics only."""
        image = self.images[index]
        first, second = self.view(image), self.view(image)
        return {"image": image, "first": first, "second": second, "label": self.labels[index]}

    def view(self, image: Tensor) -> Tensor:
        """Return a random version of an image (1, H, W)."""
        turn, stretch_x, stretch_y, x, y, contrast = (self.strength * (2 * torch.rand(6) - 1)).tolist()
        angle = torch.tensor(0.52 * turn)
        rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        scale = torch.tensor([[1 + 0.25 * stretch_x], [1 + 0.25 * stretch_y]])
        shift = torch.tensor([[0.25 * x], [0.25 * y]])
        grid = affine_grid(torch.cat([scale * rotation, shift], dim=1)[None], [1, *image.shape], align_corners=False)
        moved = grid_sample(image[None], grid, align_corners=False)[0]
        return moved * (1 + 0.3 * contrast) + 0.1 * self.strength * torch.randn(image.shape)
