"""Data sets in tar files, and the tool that packs them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import UserError
from library.data.image_folder_dataset import ImageFolderDataset
from library.data.tar_dataset import TarDataset, TarStream
from library.data.tar_shards import scan
from tests.conftest import Runs, load
from tests.data.test_images import images
from tests.resume import same_after_cut
from tools.pack import main as pack

SIZE = [8, 8]
CLASSES = {"cat": 13, "dog": 9, "emu": 10}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """32 images of three classes, in shards of 8."""
    images(tmp_path / "photos", CLASSES)
    assert pack([str(tmp_path / "photos"), str(tmp_path / "packed"), "--samples-per-shard", "8"]) == 0
    return tmp_path / "packed"


def tar(folder: Path, kind: type = TarDataset, **more: Any) -> Any:
    return kind(folder, "train", more.pop("shards", "*.tar"), size=SIZE, **more)


def values(samples: Any) -> Counter[tuple[int, bytes]]:
    return Counter((int(each["label"]), each["image"].numpy().tobytes()) for each in samples)


def test_packed_samples_are_those_of_the_folder(shards: Path) -> None:
    """Every image once, with its class, by index and in sequence."""
    folder = ImageFolderDataset(shards.parent, "train", "photos", size=SIZE)
    data = tar(shards)
    assert len(data) == len(folder) == 32 and data.classes == folder.classes and data.random is False
    expected = values(folder[index] for index in range(32))
    assert values(data[index] for index in range(32)) == values(tar(shards, TarStream)) == expected
    assert torch.equal(data[-1]["image"], data[31]["image"])
    assert len(set(data.sample_ids())) == 32 and str(shards / "shard-000003.tar:000031") in data.sample_ids()
    assert data.targets() == [int(data[index]["label"]) for index in range(32)]
    first = data.targets()[:8]
    assert len(set(first)) > 1  # classes are mixed
    named = tar(shards, fields={"about": "json", "image": "jpg png"})[0]
    assert set(named) == {"about", "image"} and named["about"]["class"] in CLASSES


def damaged(shards: Path, size: int) -> None:
    path = shards / "shard-000003.tar"
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("missing", ["inside data", "inside a header", "between samples", "between files", "the end"])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_shard_that_was_cut_off(shards: Path, missing: str, indexed: bool) -> None:
    """A shard cut off in the middle: the error names the file and the number of whole samples, which can be used."""
    places = [sample.files for sample in scan(shards / "shard-000003.tar")]
    end = {kind: place[0] + -(-place[1] // 512) * 512 for kind, place in places[4].items()}
    last = places[-1]["json"]
    size = {
        "inside data": end["png"] - 600,
        "inside a header": end["png"] + 100,
        "between files": end["png"],
        "between samples": end["json"],
        "the end": last[0] + -(-last[1] // 512) * 512,
    }[missing]
    if indexed:
        tar(shards)
    damaged(shards, size)
    whole = {"between samples": 5, "the end": 8}.get(missing, 4)
    for kind in (TarDataset, TarStream):
        with pytest.raises(
            UserError, match=rf"shard-000003.tar is damaged after {whole} whole samples: .*on_error: ski"
        ):
            list(values(tar(shards, kind)))
        rest = tar(shards, kind, on_error="skip")
        samples = rest if kind is TarStream else [rest[index] for index in range(len(rest))]
        assert values(samples).total() == 24 + whole


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [0, 5])
def test_readers_share_and_go_on_where_they_were(shards: Path, readers: int, shuffle: int) -> None:
    """Together they read each sample once; from any state, the rest of the pass follows; then a whole one."""
    together: list[Any] = []
    for reader in range(readers):
        stream = tar(shards, TarStream, shuffle=shuffle)
        stream.share(reader, readers)
        own, states = [], []
        for sample in stream:
            own.append(sample)
            states.append(stream.state_dict())
        together += own
        for at in (0, len(own) // 2, len(own) - 1):
            again = tar(shards, TarStream, shuffle=shuffle)
            again.share(reader, readers)
            again.load_state_dict(json.loads(json.dumps(states[at])))
            assert again.state_dict() == states[at]
            rest = list(again)
            assert [each["image"].sum() for each in rest] == [each["image"].sum() for each in own[at + 1 :]]
            assert len(list(again)) == len(own)
        if readers == 2:
            assert states[len(own) // 2 - 1] == {"shard": 0, "sample": 8}  # whole shards
    assert values(together) == values(tar(shards, TarStream))


def test_every_epoch_is_shuffled_anew(shards: Path) -> None:
    stream = tar(shards, TarStream, shuffle=4, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append([float(each["image"].sum()) for each in stream])
    assert orders[0] != orders[1] and orders[0] == orders[2] and sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != [float(each["image"].sum()) for each in tar(shards, TarStream, shuffle=4, seed=2)]


def on_shards(shards: Path, kind: str, *more: str, **extra: Any) -> list[str]:
    """Return the words of a run on the shards, with a model that has no batch norm."""
    part = f"shards: {shards}/*.tar, size: [8, 8], channels: 1"
    train = f"{{type: {kind}, {part}{''.join(f', {key}: {value}' for key, value in extra.items())}}}"
    val = f"{{type: TarDataset, {part}}}"
    model = "{type: tests.small.Plain}"
    return ["--dataset.train", train, "--dataset.val", val, "--dataset.eval", "null", "--model", model, *more]


def test_a_run_on_a_stream_of_shards_resumes_exactly(runs: Runs, shards: Path) -> None:
    """Through the user's door; it ends like one that was never stopped, and with as many steps."""
    more = on_shards(shards, "TarStream", "--batch_size", "5", "--progress.epoch_val", "1", shuffle=6)
    uncut, _ = same_after_cut(runs, "plain", *more, at=10)
    assert load(uncut)["position"]["step"] == 14
