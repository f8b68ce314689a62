"""Record a checksum of each sample of a run's data in `data.npz`, so that `tools.verify` can name what changed."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.base.files import atomic_file, warn_on_oserror
from common.data.keyed import KeyedBatches
from common.data.reading import checksum
from common.data.workers import OtherProcess, context_of
from common.run_context import RunContext
from common.trainer import Trainer

RECORD = "data.npz"
_MOST = 1_000_000  # samples of a dataset; of more, evenly spread ones
_SECONDS = 60.0  # for reading each dataset, beside the training
_PATIENCE_S = 10.0  # how long the end of a training waits for the record


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Write the record while the block trains, in another process. A resume keeps the first one."""
    file = run.paths.root / RECORD
    readable = [name for name, reading in trainer.read.items() if not reading.unread and not reading.varies]
    if not readable or run.folder is None or file.exists():
        yield
        return
    batches = {name: trainer.parts.deciding_data()[name].batches for name in readable}
    writer = OtherProcess(context_of(trainer.stream._loader), write_record, file, batches)
    try:
        yield
        with suppress(Exception):  # tools.verify says that there is no record
            writer.result(_PATIENCE_S)
    finally:
        writer.end()


def write_record(file: Path, data: Mapping[str, KeyedBatches]) -> None:
    """Write numbers and checksums of samples, (samples, 2), for each dataset by its name."""
    os.nice(19)
    random, record = np.random.default_rng(0), {}
    for name, batches in data.items():
        numbers = np.arange(0, batches.size, -(-batches.size // _MOST))
        record[name] = read_samples(batches, random.permutation(numbers).tolist(), _SECONDS)
    with warn_on_oserror(file.name), atomic_file(file) as out:
        np.savez(out, **record)  # type: ignore[arg-type]


def read_samples(batches: KeyedBatches, numbers: Sequence[int], seconds: float = float("inf")) -> NDArray[np.int64]:
    """Return numbers and checksums of samples, as training reads them in its first epoch; not of unreadable ones."""
    until, read = time.monotonic() + seconds, []
    for number in numbers:
        if time.monotonic() > until:
            break
        with suppress(Exception):  # reported where it is read for training
            read.append((number, int(checksum(batches.items(0, [number])[0])[:15], 16)))
    return np.array(read, np.int64).reshape(-1, 2)


def changed_samples(record: NDArray[np.int64], batches: KeyedBatches) -> list[str]:
    """Return the samples that differ from their record, or are gone."""
    numbers = record[record[:, 0] < batches.size, 0].tolist()
    now = dict(read_samples(batches, numbers).tolist())
    return [f"sample {number}" for number, before in sorted(record.tolist()) if now.get(number) != before]
