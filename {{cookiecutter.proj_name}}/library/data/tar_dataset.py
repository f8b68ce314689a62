"""Datasets in tar files: few large files instead of many small ones. `python -m tools.pack` writes them.

A sample is a dict. `fields` names the files that it consists of: `{image: jpg png, label: cls}` reads `image` from the
file `.jpg`, or `.png` if there is none. Images are read as (C, H, W), float in 0..1; `cls` as int64; `json`, `txt` and
`npy` as the values they hold; others as bytes.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import torch

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from common.distributed.seed import mix
from library.data.image_files_dataset import UNREADABLE, ImageFiles
from library.data.shared_list import SharedList
from library.data.tar_shards import Sample, decode, find_shards, read_bytes, read_index, scan

FIELDS = {"image": "jpg jpeg png webp", "label": "cls"}


class _Tar:
    """Common base of both datasets.

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
        """Read the fields of a sample. Raises `UserError` if one is missing or cannot be decoded."""
        values = {}
        for name in self.fields:
            kind = self.kind(shard, sample, name)
            try:
                values[name] = decode(kind, read_bytes(shard, *sample.files[kind]), self.size, self.channels)
            except UNREADABLE as error:
                raise UserError(f"cannot read {sample.key}.{kind} in {shard}: {error}") from error
        return values


@DATASET_REGISTRY.register()
class TarDataset(_Tar):
    """Samples in tar shards, by index.

    The positions of the files in a shard are read once, and kept in `<shard>.index` beside it.

    Args:
        data_dir: parent of all datasets.
        mode: train, val or eval; used in messages only.
        shards: files, such as `photos/train-*.tar`, relative to `data_dir` or absolute; a pattern or a list of them.
        fields: files that a sample consists of, see the beginning of this file.
        size: images are resized to this height and width, pixels; null: do not resize.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
        on_error: what to do about a shard whose end is missing: `raise` an error, or `skip` the end.
    """

    def prepare(self) -> None:
        self.samples = SharedList(self._index())

    def _index(self) -> Iterator[tuple[int, str, dict[str, Sequence[int]]]]:
        """Yield the number of its shard, the name and the files of every sample."""
        for number, shard in enumerate(self.shards):
            for sample in read_index(shard, self.skip):
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

    def digest(self) -> list[tuple[str, int]]:
        """Return names and sizes of the shards, which a resume compares."""
        return [(shard.name, shard.stat().st_size) for shard in self.shards]

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
        order, every = self._permute(len(self.shards)), self.readers
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
        samples = scan(self.shards[number], self.skip)
        for turn in count():
            block = list(islice(samples, max(1, self.shuffle)))
            if not block:
                return
            yield from (block[at] for at in self._permute(len(block), number, turn))

    def _permute(self, size: int, *key: int) -> list[int]:
        """Shuffle the numbers below `size`; the order depends on seed, epoch and `key`."""
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch, *key))
        return torch.randperm(size, generator=generator).tolist()
