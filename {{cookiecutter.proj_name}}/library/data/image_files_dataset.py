"""Images without labels: single files, or all below a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import Self

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from library.data.files_below import files_below

# No other of Pillow's formats is opened, whatever the file's name: some start programs (EPS: Ghostscript).
# Written out, since Pillow would import all its formats to list them.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_SUFFIXES = (
    ".bmp .gif .jfif .jpe .jpg .jpeg .jp2 .j2k .jpc .jpf .jpx .j2c .png .apng .pbm .pgm .ppm .pnm .pfm .tif .tiff .webp"
)
SUFFIXES = frozenset(_SUFFIXES.split())
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises


@DATASET_REGISTRY.register()
class ImageFiles:
    """Images without labels: all below `<data_dir>/<folder>/`, in the order of their names.

    Args:
        data_dir: parent of all datasets.
        mode: train, val or eval; used in messages only.
        folder: folder of this dataset, relative to `data_dir` or absolute.
        size: images are resized to this height and width, pixels; null: do not resize.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
    """

    random = False
    suffixes = SUFFIXES
    """Of the files below a folder, those that are images."""

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        folder: str = ".",
        size: tuple[PositiveInt, PositiveInt] | None = (32, 32),
        channels: Literal[1, 3, 4] = 3,
    ) -> None:
        root = data_dir / folder
        self.files: Sequence[Any] = [path for path in files_below(root) if path.suffix.lower() in self.suffixes]
        self.size: Sequence[int] | None = size
        self.channels = channels
        if not self.files:
            raise UserError(f"dataset.{mode}: there are no images below {root}")

    @classmethod
    def from_files(cls, files: Sequence[Any], size: Sequence[int] | None, channels: Literal[1, 3, 4], **_: Any) -> Self:
        """Return a dataset of these files; each is a path, or an open file in binary mode.

        Other arguments are ignored.
        """
        self = cls.__new__(cls)
        self.files = files
        self.size = size
        self.channels = channels
        return self

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`image` (C, H, W), float in 0..1, and `name`, that of the file without its folder."""
        file = self.files[index]
        name = ""
        if not hasattr(file, "read"):
            name = str(file)
        try:
            image = read_image(file, self.size, self.channels)
        except UNREADABLE as error:
            raise UserError(f"cannot read the image {name}: {error}") from error
        return {"image": image.contiguous(), "name": Path(name).name}


def read_image(source: str | Path | BinaryIO, size: Sequence[int] | None, channels: int) -> Tensor:
    """Read the image in a file as (C, H, W), float in 0..1; `size`: resized to (height, width).

    Raises one of UNREADABLE.
    """
    try:
        opened = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is not in one of the formats {', '.join(FORMATS)}") from None
    with opened as file:
        # Cameras store the image unrotated, with its orientation as metadata.
        picture = _eight_bits(ImageOps.exif_transpose(file)).convert(_MODES[channels])
        if size is not None:
            picture = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.float32).reshape(picture.height, picture.width, channels) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Scale 16 bits per pixel to 8. Pillow's own conversion clips, which makes most of the image white."""
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
