"""Time of the digest of a million files, against the time it takes to list them.

Both are CPU seconds of one process, with the files' entries in the kernel's cache: the least that they can take.
Run:  python bench/data_digest.py [--files N] [--folder PATH]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

from common.data.digest import digest  # noqa: E402
from library.data.image_folder_dataset import ImageFolderDataset  # noqa: E402

CLASSES = 100


def main() -> None:
    """Create the files, and print a line for listing them and one for the digest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="parent of a temporary folder for the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for number in range(options.files):
            path = Path(root) / f"class_{number % CLASSES:03d}" / f"image_{number:07d}.png"
            if number < CLASSES:
                path.parent.mkdir()
            path.touch()
        start = time.process_time(), time.perf_counter()
        dataset = ImageFolderDataset(Path(root), "train", ".")
        listed = time.process_time(), time.perf_counter()
        found = digest(dataset)
        done = time.process_time(), time.perf_counter()
    assert found["files"] == options.files
    for what, before, after in (("listing", start, listed), ("digest", listed, done)):
        cpu, wall = (b - a for a, b in zip(before, after, strict=True))
        print(f"{what:8} {options.files:,} files: {cpu:6.2f} s of CPU, {wall:6.2f} s")


if __name__ == "__main__":
    main()
