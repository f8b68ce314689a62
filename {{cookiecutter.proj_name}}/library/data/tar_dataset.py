"""Data sets in tar files: few large files instead of many small ones. `python -m tools.pack` writes them.

A sample is a dict. `fields` names the files that it consists of: `{image: jpg png, label: cls}` reads `image` from the
file `.jpg`, or `.png` if there is none. Images are read as (C, H, W), float in 0..1; `cls` as int64; `json`, `txt` and
`npy` as the values they hold; others as bytes.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loguru import logger

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from common.data.image_files_dataset import ImageFiles
from common.distributed.seed import mix
from library.data.tar_shards import DamagedShard, Sample, find_shards, read_bytes, read_field, read_index, scan

FIELDS = {"image": "jpg jpeg png webp", "label": "cls"}


class _Tar:
    """Common base of both data sets.

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
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.shards = find_shards(data_dir, shards, f"dataset.{mode}")
        self.fields = {name: kinds.split() for name, kinds in fields.items()}
        self.size, self.channels, self.skip = size, channels, on_error == "skip"
        if (names := self.shards[0].with_name("classes.json")).is_file():
            self.classes = tuple(json.loads(names.read_bytes()))
        self.prepare()

    def prepare(self) -> None:
        """Prepare reading; called before the first sample."""

    def kind(self, shard: Path, sample: Sample, name: str) -> str:
        """Return the kind of the file that holds the field `name` of a sample. Raises `UserError` if there is none."""
        for kind in self.fields[name]:
            if kind in sample.files:
                return kind
        said = f"its files are {', '.join(sample.files)}, and fields.{name} is {' '.join(self.fields[name])}"
        raise UserError(f"{shard}: sample {sample.key} has no file for {name}: {said}")

    def read(self, shard: Path, sample: Sample) -> dict[str, Any]:
        """Read the fields of a sample."""
        kinds = {name: self.kind(shard, sample, name) for name in self.fields}
        return {name: read_field(shard, sample, kind, self.size, self.channels) for name, kind in kinds.items()}


@DATASET_REGISTRY.register()
class TarDataset(_Tar):
    """Samples in tar shards, by index.

    The positions of the files in a shard are read once, and kept in `<shard>.index` beside it.

    Args:
        data_dir: parent of all data sets.
        mode: train, val or eval; used in messages only.
        shards: files, such as `photos/train-*.tar`, relative to `data_dir` or absolute; a pattern or a list of them.
        fields: files that a sample consists of, see the beginning of this file.
        size: images are resized to this height and width, pixels; null: do not resize.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
        on_error: what to do about a shard whose end is missing: `raise` an error, or `skip` the end.
    """

    def prepare(self) -> None:
        self.kinds = sorted({kind for kinds in self.fields.values() for kind in kinds})
        numbers, self.ends = array("q"), [0]
        for shard in self.shards:
            samples, damage = read_index(shard)
            if damage and not self.skip:
                raise UserError(damage)
            if damage:
                logger.warning(damage)
            for sample in samples:
                for kind in (self.kind(shard, sample, name) for name in self.fields):
                    numbers.extend((self.kinds.index(kind), *sample.files[kind]))
            self.ends.append(self.ends[-1] + len(samples))
        # Kind, offset and size of each field, shape (samples, fields, 3): a tensor, which all workers share.
        self.places = torch.from_numpy(np.array(numbers, dtype=np.int64)).view(-1, len(self.fields), 3)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a sample: a dict of the `fields`."""
        index = range(len(self))[index]
        number = bisect_right(self.ends, index) - 1
        files = {self.kinds[kind]: (offset, size) for kind, offset, size in self.places[index].tolist()}
        shard, index = self.shards[number], index - self.ends[number]
        try:
            return self.read(shard, Sample("", files))
        except UserError:  # again, for a message that names the sample
            return self.read(shard, read_index(shard)[0][index])

    def targets(self) -> list[int]:
        """Read the class of every sample; for `loader.order: {type: balanced}`."""
        column = list(self.fields).index("label")
        shards = [
            shard for shard, n, m in zip(self.shards, self.ends, self.ends[1:], strict=False) for _ in range(m - n)
        ]
        places = self.places[:, column, 1:].tolist()
        return [int(read_bytes(shard, *place)) for shard, place in zip(shards, places, strict=True)]

    def sample_ids(self) -> list[str]:
        """Return shard and name of every sample; train, val and eval should have none in common."""
        return [f"{shard.resolve()}:{sample.key}" for shard in self.shards for sample in read_index(shard)[0]]


@DATASET_REGISTRY.register()
class TarStream(_Tar):
    """Samples in tar shards, for training, each shard read from its beginning to its end; needs no index.

    Readers share whole shards if these can be divided evenly among them, and single samples otherwise. A resumed run
    continues with the next sample if `num_workers` is 0.

    Args:
        data_dir, mode, shards, fields, size, channels, on_error: as for `TarDataset`.
        shuffle: 0 keeps the order. Otherwise, shards are read in another order in every epoch, and this number of
            samples is shuffled at a time. Their images are not held in memory.
        seed: seed of the shuffling.
    """

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        shards: str | list[str],
        fields: dict[str, str] = FIELDS,
        size: list[int] | None = [32, 32],  # noqa: B006
        channels: Literal[1, 3, 4] = 3,
        on_error: Literal["raise", "skip"] = "raise",
        shuffle: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(data_dir, mode, shards, fields, size, channels, on_error)
        self.shuffle, self.seed = shuffle, seed
        self.reader, self.readers = 0, 1
        self.epoch = self.shard = self.sample = 0
        self._start = (0, 0)  # shard and sample at which the next pass begins

    def share(self, reader: int, readers: int) -> None:
        """Read only share `reader` (from 0) of `readers`."""
        self.reader, self.readers = reader, readers

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, which determines the order if samples are shuffled."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"shard": self.shard, "sample": self.sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = self.shard, self.sample = state["shard"], state["sample"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        (self.shard, self.sample), self._start = self._start, (0, 0)
        order, every = self._permuted(len(self.shards)), self.readers
        if len(order) % self.readers == 0:
            order, every = order[self.reader :: self.readers], 1
        while self.shard < len(order):
            for number, sample in enumerate(self._samples(order[self.shard])):
                if number >= self.sample and (number - self.reader) % every == 0:
                    self.sample = number + 1
                    yield self.read(self.shards[order[self.shard]], sample)
            self.shard, self.sample = self.shard + 1, 0
        self.shard = 0

    def _samples(self, number: int) -> Iterator[Sample]:
        """Yield the samples of a shard in reading order."""
        samples = self._scan(self.shards[number])
        for turn in count():
            block = list(islice(samples, max(1, self.shuffle)))
            if not block:
                return
            yield from (block[at] for at in self._permuted(len(block), number, turn))

    def _scan(self, shard: Path) -> Iterator[Sample]:
        try:
            yield from scan(shard)
        except DamagedShard as error:
            if not self.skip:
                raise
            logger.warning(error)

    def _permuted(self, size: int, *key: int) -> list[int]:
        """Shuffle the numbers below `size`; the order depends on seed, epoch and `key`."""
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch, *key))
        return torch.randperm(size, generator=generator).tolist()
