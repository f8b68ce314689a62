"""Data sets in tar files, and the tool that packs them."""

import io
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from common.base.errors import UserError
from library.data.tar_dataset import TarDataset
from library.data.tar_shards import read_index, scan
from tests.conftest import ErrorOf, run
from tests.data.test_images import images
from tests.data.test_tar import CLASSES, on_shards, tar, values
from tools.pack import main as pack


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """32 images of three classes, in shards of 8."""
    images(tmp_path / "photos", CLASSES)
    assert pack([str(tmp_path / "photos"), str(tmp_path / "packed"), "--samples-per-shard", "8"]) == 0
    return tmp_path / "packed"


@pytest.mark.slow
def test_packing_twice_gives_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    """Whatever the dates and the order on the disk; from the command line."""
    for index, path in enumerate(sorted((tmp_path / "photos").rglob("*.png"), reverse=True)):
        (tmp_path / "again" / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / "again" / path.parent.name / path.name)
        os.utime(tmp_path / "again" / path.parent.name / path.name, (index, index))
    out = tmp_path / "other"
    done = run([sys.executable, "-m", "tools.pack", str(tmp_path / "again"), str(out), "--samples-per-shard", "8"])
    assert done.returncode == 0 and f"4 shards in {out}" in done.stdout, done.stderr
    names = sorted(path.name for path in out.iterdir())
    assert names == ["classes.json", *(f"shard-{number:06d}.tar" for number in range(4))]
    assert all((out / name).read_bytes() == (shards / name).read_bytes() for name in names)
    with pytest.raises(UserError, match="exists; remove it first"):
        pack([str(tmp_path / "again"), str(out)])


def test_a_pack_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images(tmp_path / "photos", CLASSES)
    monkeypatch.setattr("tools.pack.add", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack([str(tmp_path / "photos"), str(tmp_path / "packed")])
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    for folder, words_ in (("none", "there is no folder"), ("photos/cat", "at least two; found: none")):
        with pytest.raises(UserError, match=words_):
            pack([str(tmp_path / folder), str(tmp_path / "packed")])


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def test_files_of_every_kind(tmp_path: Path) -> None:
    """Folders, several dots, capitals, hidden files; a missing part of a sample is named in the error."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, array)
    raw = (tmp_path / "a.npy").read_bytes()
    long = "x" * 120
    members = [
        ("a/b.left.npy", raw), ("a/b.TXT", b"text"), ("a/._b.npy", b"?"), ("a/b.cls", b"7"), ("a/b.bin", b"\0\1"),
        (f"{long}.left.npy", raw), (f"{long}.txt", b"more"), (f"{long}.cls", b"8\n"), (f"{long}.bin", b""),
    ]  # fmt: skip
    write_shard(tmp_path / "s.tar", members)
    fields = {"left": "left.npy", "text": "text txt", "label": "cls", "raw": "bin"}
    data = tar(tmp_path, fields=fields)
    assert len(data) == 2
    assert torch.equal(data[0]["left"], torch.from_numpy(array)) and data[0]["text"] == "text"
    assert (int(data[0]["label"]), data[0]["raw"], int(data[1]["label"])) == (7, b"\0\1", 8)
    with pytest.raises(UserError, match=r"s.tar: sample a/b has no file for image: its files are left.npy, txt, cls"):
        tar(tmp_path)
    with pytest.raises(UserError, match=r"train.shards: there is no file .*/none-\*.tar"):
        tar(tmp_path, shards="none-*.tar")
    write_shard(tmp_path / "s.tar", [("a.cls", b"one"), ("a.jpg", b"no image")])
    with pytest.raises(UserError, match=r"cannot read a.jpg in .*s.tar"):
        tar(tmp_path)[0]


def test_the_index_is_kept_and_renewed(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once; again when a shard has changed, when the index is damaged; and if it cannot be written."""
    calls: list[str] = []

    def counted(shard: Path) -> Any:
        calls.append(shard.name)
        return scan(shard)

    monkeypatch.setattr("library.data.tar_shards.scan", counted)
    expected = [tar(shards)[index]["label"] for index in range(32)]
    assert len(calls) == 4
    assert [tar(shards)[index]["label"] for index in range(32)] == expected and len(calls) == 4
    (shards / "shard-000001.tar.index").write_text('{"shard": [1,')
    os.utime(shards / "shard-000002.tar", (1, 1))
    assert [tar(shards)[index]["label"] for index in range(32)] == expected
    assert calls[4:] == ["shard-000001.tar", "shard-000002.tar"]
    write_shard(shards / "shard-000003.tar", [("new.cls", b"1"), ("new.txt", b"a")])
    assert len(tar(shards, fields={"label": "cls"})) == 25
    os.remove(shards / "shard-000000.tar.index")
    monkeypatch.setattr("library.data.tar_shards.write_text", read_only)
    assert len(tar(shards, fields={"label": "cls"})) == 25


def read_only(path: Path, text: str) -> None:
    raise OSError("read-only file system")


def _build_index(folder: str, results: Any) -> None:
    found = [read_index(path) for path in sorted(Path(folder).glob("*.tar"))]
    results.put(json.loads(json.dumps(found)))  # tuples and lists alike


def test_processes_that_build_the_index_at_once(shards: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_build_index, args=(str(shards), results)) for _ in range(6)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert all(each == found[0] for each in found) and sum(map(len, found[0])) == 32
    assert sorted(path.name for path in shards.iterdir() if path.suffix not in (".tar", ".json")) == [
        f"shard-{number:06d}.tar.index" for number in range(4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_at_random_without_disturbing_each_other(shards: Path, method: str) -> None:
    """Opened before the fork: a position that the processes share would mix up what they read."""
    data = tar(shards)
    expected = values(data[index] for index in range(32))
    loader = DataLoader(data, batch_size=None, num_workers=2, shuffle=True, multiprocessing_context=method)
    assert all(values(loader) == expected for _ in range(1 if method == "spawn" else 5))


def test_no_shard_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"nothing of the kind" * 100)
    (tmp_path / "b.tar").write_bytes(b"")
    for name in ("a", "b"):
        with pytest.raises(UserError, match=rf"{name}.tar is damaged: "):
            tar(tmp_path, shards=f"{name}.tar")


@pytest.mark.slow
def test_shards_are_those_of_webdataset(shards: Path, tmp_path: Path) -> None:
    """The real package reads what `tools.pack` writes, and its own files are read here."""
    import webdataset  # slow to import

    theirs = webdataset.WebDataset([str(path) for path in sorted(shards.glob("*.tar"))], shardshuffle=False)
    records = list(theirs.decode("rgb8").to_tuple("png", "cls", "json", "__key__"))
    own = TarDataset(shards, "train", "*.tar", size=None)
    assert len(records) == len(own) == 32
    for (image, label, _, key), sample in zip(records, map(own.__getitem__, range(32)), strict=True):
        assert label == sample["label"] and key in own.sample_ids()[int(key)]
        assert np.array_equal(image, (sample["image"] * 255).round().byte().permute(1, 2, 0).numpy())
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "theirs" / "s-%03d.tar"), maxcount=8, verbose=0) as sink:
        for image, label, about, key in records:
            sink.write({"__key__": f"part/{key}", "png": image, "cls": label, "json": about})
    again = TarDataset(tmp_path / "theirs", "train", "*.tar", size=None)
    assert values(map(again.__getitem__, range(32))) == values(own[index] for index in range(32))
    assert again.sample_ids()[9].endswith("s-001.tar:part/000009")


def test_mistakes_in_the_config(error_of: ErrorOf, shards: Path) -> None:
    text = error_of(*on_shards(shards, fields="{image: 3}", chanels=3))
    assert "dataset.train.fields" in text and "dataset.train.chanels = 3" in text
    assert "did you mean channels?" in text
