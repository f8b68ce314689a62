"""A dataset in tar files: few large files instead of many small ones. `python -m tools.pack` writes them.

A sample is a dict. `fields` names the files that it consists of: `{image: jpg png, label: cls}` reads `image` from the
file `.jpg`, or `.png` if there is none. Images are read as (C, H, W), float in 0..1; `cls` as int64; `json`, `txt` and
`npy` as the values they hold; others as bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from library.data.image_files_dataset import UNREADABLE, ImageFiles
from library.data.shared_list import SharedList
from library.data.tar_shards import decode, find_shards, read_bytes, read_index

FIELDS = {"image": "jpg jpeg png webp", "label": "cls"}


@DATASET_REGISTRY.register()
class TarDataset:
    """Samples in tar shards, by index.

    The positions of the files in a shard are read once, and kept in `<shard>.index` beside it.

    Args:
        data_dir: parent of all datasets.
        mode: train, val or eval; used in messages only.
        shards: files, such as `photos/train-*.tar`, relative to `data_dir` or absolute; a pattern or a list of them.
        fields: files that a sample consists of, see the beginning of this file.
        size: images are resized to this height and width, pixels; null: do not resize.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).

    Attributes:
        classes: class names from the list in `classes.json` beside the shards; missing without that file.
    """

    random = False
    from_files = ImageFiles.from_files  # for predictions
    suffixes = ImageFiles.suffixes
    classes: tuple[str, ...]

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        shards: str | list[str],
        fields: dict[str, str] = FIELDS,
        size: list[int] | None = [32, 32],  # noqa: B006 - never changed; --list shows it as the default
        channels: Literal[1, 3, 4] = 3,
    ) -> None:
        self.shards = find_shards(data_dir, shards, f"dataset.{mode}")
        self.size = size
        self.channels = channels
        names = self.shards[0].with_name("classes.json")
        if names.is_file():
            self.classes = tuple(json.loads(names.read_bytes()))
        self.samples = SharedList(self._index(fields))

    def _index(self, fields: dict[str, str]) -> Iterator[tuple[int, str, dict[str, tuple[str, int, int]]]]:
        """Yield the number of its shard, the name, and the place of each field of every sample: kind, offset, size."""
        for number, shard in enumerate(self.shards):
            for sample in read_index(shard):
                places = {}
                for name, kinds in fields.items():
                    found = [kind for kind in kinds.split() if kind in sample.files]
                    if not found:
                        said = f"its files are {', '.join(sample.files)}, and fields.{name} is {kinds}"
                        raise UserError(f"{shard}: sample {sample.key} has no file for {name}: {said}")
                    offset, size = sample.files[found[0]]
                    places[name] = (found[0], offset, size)
                yield number, sample.key, places

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a sample: a dict of the `fields`. Raises `UserError` if one cannot be decoded."""
        number, key, places = self.samples[index]
        shard = self.shards[number]
        values = {}
        for name, (kind, offset, size) in places.items():
            data = read_bytes(shard, offset, size)
            try:
                values[name] = decode(kind, data, self.size, self.channels)
            except UNREADABLE as error:
                raise UserError(f"cannot read {key}.{kind} in {shard}: {error}") from error
        return values

    def targets(self) -> list[int]:
        """Read the class of every sample; for `loader.order: {type: balanced}`."""
        labels = []
        for number, _, places in self.samples:
            _, offset, size = places["label"]
            labels.append(int(read_bytes(self.shards[number], offset, size)))
        return labels

    def sample_ids(self) -> list[str]:
        """Return shard and name of every sample; train, val and eval should have none in common."""
        return [f"{self.shards[number].resolve()}:{key}" for number, key, _ in self.samples]
