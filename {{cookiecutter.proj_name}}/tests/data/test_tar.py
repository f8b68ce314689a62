"""Data sets in tar files, and the tool that packs them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import UserError
from library.data.image_folder_dataset import ImageFolderDataset
from library.data.tar_dataset import TarDataset
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


def tar(folder: Path, **more: Any) -> Any:
    return TarDataset(folder, "train", more.pop("shards", "*.tar"), size=SIZE, **more)


def values(samples: Any) -> Counter[tuple[int, bytes]]:
    return Counter((int(each["label"]), each["image"].numpy().tobytes()) for each in samples)


def test_packed_samples_are_those_of_the_folder(shards: Path) -> None:
    """Every image once, with its class."""
    folder = ImageFolderDataset(shards.parent, "train", "photos", size=SIZE)
    data = tar(shards)
    assert len(data) == len(folder) == 32 and data.classes == folder.classes and data.random is False
    expected = values(folder[index] for index in range(32))
    assert values(data[index] for index in range(32)) == expected
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
    """A shard cut off in the middle: the error names the file."""
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
    with pytest.raises(UserError, match=r"3.tar is damaged: .*pack it again"):
        tar(shards)


def on_shards(shards: Path, *more: str, **extra: Any) -> list[str]:
    """Return the words of a run on the shards, with a model that has no batch norm."""
    part = f"type: TarDataset, shards: {shards}/*.tar, size: [8, 8], channels: 1"
    train = f"{{{part}{''.join(f', {key}: {value}' for key, value in extra.items())}}}"
    model = "{type: tests.small.Plain}"
    val = f"{{{part}}}"
    return ["--dataset.train", train, "--dataset.val", val, "--dataset.eval", "null", "--model", model, *more]


def test_a_run_on_shards_resumes_exactly(runs: Runs, shards: Path) -> None:
    """Through the user's door; it ends like one that was never stopped."""
    uncut, _ = same_after_cut(runs, "plain", *on_shards(shards, "--batch_size", "5"), at=10)
    assert load(uncut)["position"]["step"] == 14
