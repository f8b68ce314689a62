"""A dataset in tar files: few large files instead of many small ones. `python -m tools.pack` writes them.

A sample is a dict. `fields` names the files that it consists of: `{image: jpg png, label: cls}` reads `image` from the
file `.jpg`, or `.png` if there is none. Images are read as (C, H, W), float in 0..1; `cls` as int64; `json`, `txt` and
`npy` as the values they hold; others as bytes.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from library.data.image_files_dataset import UNREADABLE, ImageFiles
from library.data.shared_list import SharedList
from library.data.tar_shards import Sample, decode, find_shards, read_bytes, read_index

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
    from_files, suffixes = ImageFiles.from_files, ImageFiles.suffixes  # for predictions
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
        self.fields = {name: kinds.split() for name, kinds in fields.items()}
        self.size, self.channels = size, channels
        if (names := self.shards[0].with_name("classes.json")).is_file():
            self.classes = tuple(json.loads(names.read_bytes()))
        self.samples = SharedList(self._index())

    def _index(self) -> Iterator[tuple[int, str, dict[str, Sequence[int]]]]:
        """Yield the number of its shard, the name and the files of every sample."""
        for number, shard in enumerate(self.shards):
            for sample in read_index(shard):
                kinds = [self.kind(shard, sample, name) for name in self.fields]
                yield number, sample.key, {kind: sample.files[kind] for kind in kinds}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a sample: a dict of the `fields`."""
        number, key, files = self.samples[index]
        return self.read(self.shards[number], Sample(key, files))

    def targets(self) -> list[int]:
        """Read the class of every sample; for `loader.order: {type: balanced}`."""
        kinds = self.fields["label"]
        places = [(number, next(files[kind] for kind in kinds if kind in files)) for number, _, files in self.samples]
        return [int(read_bytes(self.shards[number], *span)) for number, span in places]

    def sample_ids(self) -> list[str]:
        """Return shard and name of every sample; train, val and eval should have none in common."""
        shards = [shard.resolve() for shard in self.shards]
        return [f"{shards[number]}:{key}" for number, key, _ in self.samples]

    def kind(self, shard: Path, sample: Sample, name: str) -> str:
        """Return the kind of the file that holds the field `name` of a sample. Raises `UserError` if there is none."""
        for kind in self.fields[name]:
            if kind in sample.files:
                return kind
        said = f"its files are {', '.join(sample.files)}, and fields.{name} is {' '.join(self.fields[name])}"
        raise UserError(f"{shard}: sample {sample.key} has no file for {name}: {said}")

    def read(self, shard: Path, sample: Sample) -> dict[str, Any]:
        """Read the fields of a sample. Raises `UserError` if one is missing or cannot be decoded."""
        values = {}
        for name in self.fields:
            kind = self.kind(shard, sample, name)
            try:
                values[name] = decode(kind, read_bytes(shard, *sample.files[kind]), self.size, self.channels)
            except UNREADABLE as error:
                raise UserError(f"cannot read {sample.key}.{kind} in {shard}: {error}") from error
        return values
