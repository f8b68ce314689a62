"""Batches of mixed images."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.data.keyed import KeyedBatches, find_collate
import train
from library.data.mix_collate import CutMix, Mixup
from tests.conftest import Runs, metrics, same
from tests.resume import differing, final, same_after_cut, words
from tests.samples import CrossEntropy, Digits

DATA = Path(train.__file__).parent / "data"


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mixed_batches(name: str) -> None:
    """Images and labels are mixed in the same shares; a batch is a function of its seed."""
    data = Digits(DATA, "train")
    collate = find_collate(data, {"type": name, "alpha": 1.0}, training=True)
    make = lambda key: KeyedBatches(data, collate, seed=3).__getitems__(key)  # noqa: E731
    indices = list(range(8))
    batch = make((0, indices))
    assert same(batch, make((0, indices))) and not same(batch, make((1, indices)))
    assert batch["image"].shape == (8, 1, 8, 8) and batch["soft_label"].shape == (8, 10)
    torch.testing.assert_close(batch["soft_label"].sum(1), torch.ones(8))
    assert torch.equal(batch["label"], batch["soft_label"].argmax(1))
    plain = data.images[:8]
    assert not torch.equal(batch["image"], plain) and batch["image"].max() <= 1
    soft = batch["soft_label"]
    logits = torch.randn(8, 10)
    expected = -(soft * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(CrossEntropy()({"logits": logits}, batch), expected)
    # The mean image is mixed from the same parts.
    assert find_collate(data, {"type": name}) is torch.utils.data.default_collate  # evaluation: nothing is mixed


def test_shares_of_mixed_images() -> None:
    first, second = torch.zeros(2, 1, 10, 10), torch.ones(2, 1, 10, 10)
    data = Digits(DATA, "train")
    mixed, share = Mixup(data).mix(first, second, 0.3)
    assert share == 0.3 and torch.allclose(mixed, torch.tensor(0.7))
    for seed in range(20):
        np.random.seed(seed)
        mixed, share = CutMix(data).mix(first, second, 0.6)
        assert share == pytest.approx(1 - float(mixed[0].mean())) and share >= 0.55
        assert torch.equal(mixed[0], mixed[1])
    assert first.sum() == 0


@pytest.mark.slow
def test_a_run_with_mixed_batches_resumes_and_evaluates_as_before(runs: Runs) -> None:
    """Training only, the same with workers and after a resume, on a dataset that draws nothing itself."""
    losses = "{$REPLACE: true, CrossEntropyLoss: {type: tests.samples.CrossEntropy}, ce: {type: tests.small.Mortal}}"
    base = words("plain", "--dataset.train", "{type: tests.samples.Digits}", "--loss", losses, "--optim.lr", "1e-99",
 "--model", "{type: tests.small.Plain}")  # fmt: skip
    mixed = [*base, "--loader.collate", "{type: mixup, alpha: 0.4}"]
    plain, alone = runs.train(*base, name="plain"), runs.train(*mixed, name="alone")
    values = [final(folder)["latest"]["values"] for folder in (plain, alone)]
    assert same(*values)  # with next to no rate, evaluations of both are alike
    learning = [word if word != "1e-99" else "0.01" for word in mixed]
    first = final(same_after_cut(runs, "plain", *learning, at=5)[0])
    assert differing(first, final(runs.train(*learning, "--num_workers", "2", name="second"))) == []
    entries = [[entry["values"] for entry in metrics(runs.root / name, "train")] for name in ("uncut", "plain")]
    assert (
        entries[0][0]["CrossEntropyLoss"] != entries[0][0]["ce"]
        and entries[1][0]["CrossEntropyLoss"] == entries[1][0]["ce"]
    )
