"""Makes the project's `data/digits.npz` from the digits that scikit-learn ships. Needs scikit-learn.

    python tools/make_digits.py OUTPUT.npz

The split is drawn once, here, and stored; nothing in a rendered project draws it again. Running this script again
with the same zlib writes the same bytes.
"""

import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

SEED = 20260101
TRAIN, VAL, TEST = 0, 1, 2
VAL_SHARE, TEST_SHARE = 300 / 1797, 297 / 1797
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date a zip can hold: a real one would change the bytes


def load_source() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (1797, 8, 8) with values 0..16 and labels (1797,) with values 0..9, in scikit-learn's order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8), digits.target.astype(np.uint8)


def draw_split(labels: NDArray[np.uint8], seed: int = SEED) -> NDArray[np.uint8]:
    """Part of each sample, (N,): 0 train, 1 val, 2 test. Every class is divided in the same proportion.

    `RandomState` and not `default_rng`: numpy promises never to change the stream of the former.
    """
    random = np.random.RandomState(seed)
    split = np.full(labels.shape, TRAIN, dtype=np.uint8)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        val, test = round(len(members) * VAL_SHARE), round(len(members) * TEST_SHARE)
        split[members[:val]] = VAL
        split[members[val : val + test]] = TEST
    return split


def write(path: Path, arrays: dict[str, NDArray[np.uint8]]) -> None:
    """Write a compressed .npz as `numpy.savez_compressed` does, but with a fixed date in every entry."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=_ZIP_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w") as file:
                npy.write_array(file, array, allow_pickle=False)


def main(path: Path) -> None:
    images, labels = load_source()
    split = draw_split(labels)
    write(path, {"images": images, "labels": labels, "split": split})
    counts = np.bincount(split, minlength=3)
    print(f"{path}: {path.stat().st_size} bytes; train {counts[0]}, val {counts[1]}, test {counts[2]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
