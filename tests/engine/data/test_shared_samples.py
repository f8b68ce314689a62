"""Samples that a run would both learn from and be judged by."""

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT, Runs
from tests.data.test_images import images
from custom.datasets.digits_dataset import DigitsDataset

CONFIG = """
$BASE: {project}/configs/default.yaml
dataset:
  train: {{type: ImageFolderDataset, folder: {folder}, size: [8, 8], channels: 1, part: {part}}}
  val:
    $REPLACE: true
    first: {{type: ImageFolderDataset, folder: {folder}, size: [8, 8], channels: 1, part: [0.5, 0.7]}}
    again: {{type: ImageFolderDataset, folder: {folder}/../link, size: [8, 8], channels: 1, part: [0.5, 0.7]}}
  eval: {{type: ImageFolderDataset, folder: {folder}, size: [8, 8], channels: 1, part: [0.7, 1]}}
model: {{classes: 2}}
best: {{metric: first.loss}}
"""


class ValAgain(DigitsDataset):
    """Reads the digits of val, whatever it is asked for."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, "val")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("[0, 1]", [("val.first", "train"), ("val.again", "train"), ("eval", "train")]),
        ("[0, 0.5]", []),  # sets of one split may have samples in common
    ],
)
def test_samples_that_splits_share(runs: Runs, tmp_path: Path, part: str, expected: list[tuple[str, str]]) -> None:
    """Each pair of splits is named, with the count, also where one folder has two names."""
    folder = images(tmp_path / "photos", {"cat": 20, "dog": 20})
    (tmp_path / "link").symlink_to(folder)
    config = tmp_path / "photos.yaml"
    config.write_text(CONFIG.format(project=PROJECT, folder=folder, part=part))
    log = (runs.train("--config", str(config), "--progress.epoch", "1") / "train.log").read_text()
    found = re.findall(r"WARNING .*dataset\.(\S+): (\d+) of (\d+) samples are also in dataset\.(\w+),", log)
    assert [(one, other) for one, _, _, other in found] == expected
    assert all(shared == size for _, shared, size, _ in found)


def test_the_digits_are_divided(runs: Runs) -> None:
    assert "samples are also in" not in (runs.train("--progress.epoch", "1") / "train.log").read_text()


def test_data_sets_of_ones_own_can_say_it_too(runs: Runs) -> None:
    """The digits of val given to eval again, some of them."""
    mine = "{type: engine.data.test_shared_samples.ValAgain}"
    log = (runs.train("--progress.epoch", "1", "--dataset.eval", mine) / "train.log").read_text()
    assert "dataset.eval: 160 of 160 samples are also in dataset.val" in log
    assert "Give each split samples of its own" in log
