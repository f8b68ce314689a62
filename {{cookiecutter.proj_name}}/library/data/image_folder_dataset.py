"""Images in one folder per class."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import PositiveInt

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from library.data.files_below import files_below
from library.data.image_files_dataset import SUFFIXES, UNREADABLE, ImageFiles, read_image


@DATASET_REGISTRY.register()
class ImageFolderDataset:
    """Images below `<data_dir>/<folder>/<class>/`, in one of the formats of `image_files_dataset.py`.

    Classes are the sub-folders in alphabetical order. If train and val are not separate folders, `part` splits one
    folder by a hash of each file's path, so a file stays in its split when others are added.

    Args:
        data_dir: parent of all datasets.
        mode: train, val or eval; used in messages only.
        folder: folder of this dataset, relative to `data_dir` or absolute.
        size: images are resized to this height and width, pixels.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
        part: range of the hash, within 0..1: for example [0, 0.8] for train and [0.8, 1] for val.
        flip: mirror images at random, with probability 0.5 (for training).
    """

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        folder: str,
        size: tuple[PositiveInt, PositiveInt] = (32, 32),
        channels: Literal[1, 3, 4] = 3,
        part: tuple[float, float] = (0.0, 1.0),
        flip: bool = False,
    ) -> None:
        self.root = Path(data_dir) / folder
        if not self.root.is_dir():
            raise UserError(f"dataset.{mode}.folder: there is no folder {self.root}")
        if not 0 <= part[0] < part[1] <= 1:
            raise UserError(f"dataset.{mode}.part: {part} must be [from, to] with 0 <= from < to <= 1")
        self.size = size
        self.channels = channels
        self.flip = flip
        self.random = flip
        self.classes = class_folders(self.root, f"dataset.{mode}")
        names, labels = sort_images(self.root, self.classes, part)
        if not names:
            raise UserError(f"dataset.{mode}: there are no images of part {part} below {self.root}")
        self.targets = np.array(labels, dtype=np.int64)  # the class of each image
        # One buffer of bytes, which loader workers share: reading a list of texts would copy it in each.
        self.names = np.array(names)

    from_files = ImageFiles.from_files  # for predictions
    suffixes = ImageFiles.suffixes

    def __len__(self) -> int:
        return len(self.names)

    def sample_ids(self) -> list[str]:
        """Return the files; train, val and eval should have none in common."""
        whole = self.root.resolve()
        return [f"{whole}/{os.fsdecode(name)}" for name in self.names]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`image` (C, H, W), float in 0..1, `label`, int64 scalar, and `name`, the path below the folder."""
        name = os.fsdecode(self.names[index])
        path = self.root / name
        try:
            image = read_image(path, self.size, self.channels)
        except UNREADABLE as error:
            raise UserError(f"cannot read the image {path}: {error}; replace or remove it") from error
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        return {"image": image.contiguous(), "label": torch.tensor(self.targets[index]), "name": name}


def class_folders(root: Path, where: str) -> tuple[str, ...]:
    """List the sub-folders of `root`, in alphabetical order. Raises `UserError` if there are fewer than two."""
    # Hidden folders (.ipynb_checkpoints) and files (._photo.jpg on a Mac) are not data.
    classes = tuple(sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."))
    if len(classes) < 2:
        names = ", ".join(classes) or "none"
        raise UserError(f"{where}: {root} needs one sub-folder per class, at least two; found: {names}")
    return classes


def sort_images(root: Path, classes: Sequence[str], part: tuple[float, float]) -> tuple[list[bytes], list[int]]:
    """Return the images below the folders of the classes whose hash is within `part`: paths below `root`, classes."""
    names = []
    labels = []
    for label, folder in enumerate(classes):
        for path in files_below(root / folder, (os.path.realpath(root),)):
            if path.suffix.lower() in SUFFIXES:
                name = os.fsencode(path.relative_to(root))
                if part[0] <= zlib.crc32(name) / 2**32 < part[1]:
                    names.append(name)
                    labels.append(label)
    return names, labels
