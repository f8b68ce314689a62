"""Samples are read before training, twice, and again by a resume."""

import re

import numpy as np
from torch import Tensor

from tests.conftest import Runs
from tests.samples import Digits


class Noisy(Digits):
    """Draws from a generator that has no seed."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"] + float(np.random.default_rng().normal())}


def test_the_same_samples_others_and_some_that_vary(runs: Runs) -> None:
    noisy = ["--dataset.train", "{type: tests.parts.data_check.test_data_check.Noisy}"]
    shifted = ["--dataset.val.shift", "1"]
    for epoch, words in enumerate(([], [], shifted, noisy), 1):
        more = ["--resume", "auto", "--allow_changes", "--progress.epoch", str(epoch)]
        log = (runs.train(*more, *words) / "train.log").read_text()
    same, other, varying = re.findall("this resume is .*", log)
    assert re.search(r"bit-exact as far .*, data \(128 of [\d,]+ samples read again: the same\), if your code", same)
    assert re.search(r"sample-exact, not bit-exact \(sample \d+ of dataset.val: `image` differs \(\d+ of 64", other)
    assert "dataset.train: reading twice gives two values, sample" in varying
    assert re.search(r"WARNING .* sample \d+ of dataset\.train twice gives two values of `image`: it depends", log)
