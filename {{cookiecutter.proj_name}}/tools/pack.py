"""Pack a folder of images, one sub-folder per class, into tar files: python -m tools.pack FOLDER OUT

The files have the layout of WebDataset, and are read by `TarDataset`. Equal input gives equal bytes.
Samples are in a random order, since readers in sequence, such as WebDataset, need mixed classes; it depends on the
files' names alone.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

from common.base.errors import UserError
from cli.program import run
from library.data.image_folder_dataset import class_folders, sort_images

SHARD = "shard-{:06d}.tar"


def pack(folder: Path, out: Path, samples_per_shard: int) -> list[Path]:
    """Write the images below `folder/<class>/` to shards in `out`, and `classes.json`. Returns the shards.

    `out` appears when it is complete. Raises `UserError` if it exists, or if there is nothing to pack.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if out.exists():
        raise UserError(f"{out} exists; remove it first, or choose another folder")
    classes = class_folders(folder, "tools.pack")
    images = list(zip(*sort_images(folder, classes, (0.0, 1.0)), strict=True))
    if not images:
        raise UserError(f"there are no images below {folder}")
    images.sort(key=lambda image: hashlib.sha256(image[0]).digest())
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        (partial / "classes.json").write_text(json.dumps(classes))
        starts = range(0, len(images), samples_per_shard)
        for number, first in enumerate(starts):
            with tarfile.open(partial / SHARD.format(number), "w", format=tarfile.USTAR_FORMAT) as archive:
                for index, (name, label) in enumerate(images[first : first + samples_per_shard], first):
                    path = folder / os.fsdecode(name)
                    about = json.dumps({"file": os.fsdecode(name), "class": classes[label]})
                    add(archive, f"{index:06d}{path.suffix.lower()}", path.read_bytes())
                    add(archive, f"{index:06d}.cls", str(label).encode())
                    add(archive, f"{index:06d}.json", about.encode())
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / SHARD.format(number) for number in range(len(starts))]


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file without date and owner."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, io.BytesIO(data))


def main(argv: list[str]) -> int:
    """Read the command line and pack. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.pack", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="contains one sub-folder per class")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--samples-per-shard", type=int, default=10000, help="by default 10000")
    options = parser.parse_args(argv)
    if options.samples_per_shard < 1:
        parser.error("--samples-per-shard must be at least 1")
    shards = pack(options.folder, options.out, options.samples_per_shard)
    print(f"{len(shards)} shards in {options.out}")
    return 0


if __name__ == "__main__":
    run(main)
