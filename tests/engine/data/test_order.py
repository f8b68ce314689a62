"""The order of an epoch's samples, by `loader.order`."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.base.errors import UserError
from common.data.keyed import KeyedBatches
from common.data.order import EpochPlan
from common.data.view import View
from common.distributed.seed import mix
from common.progress import Position
from tests.conftest import PROJECT, Runs, same
from tests.data.test_data import Noisy, seen, stream_of
from tests.data.test_sampling import Labelled, WeightedDigits, order_of
from tests.ranks import refused
from tests.resume import final, words

HERE = "engine.data.test_order"


def unseeded(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray[Any, Any]:
    return np.random.permutation(size)


class Curriculum(WeightedDigits):
    """Draws other samples in each epoch: the easy ones first."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def weights(self) -> Tensor:
        return (self.labels <= 3 * (self.epoch + 1)).float()


def of_this_process(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray[Any, Any]:
    return np.random.default_rng(os.getpid()).permutation(size)


def wrong(size: int, seed: int, epoch: int, dataset: Any, kind: str) -> Any:
    return {"range": [0, size], "type": [0.5], "empty": np.empty(0, int), "length": range(size - epoch)}[kind]


def test_the_default_is_todays_order() -> None:
    """All samples, shuffled by (seed, epoch)."""
    shuffle = order_of("shuffle")
    plan = EpochPlan(shuffle.size, batch_size=12)
    for epoch in (0, 5):
        expected = torch.randperm(12, generator=torch.Generator().manual_seed(mix(3, epoch))).tolist()
        order = shuffle(epoch)
        assert order.tolist() == next(plan.global_batches(order, Position(epoch=epoch))).indices[0] == expected
    assert order_of("sequential")(4).tolist() == list(range(12))


def test_a_repeated_sample_has_other_random_numbers() -> None:
    """Otherwise its copies would have the same augmentation."""
    found = KeyedBatches(Labelled(), list, seed=3).__getitems__((0, [6, 6 + 12, 6 + 24, 6]))
    assert [item["index"] for item in found] == [6] * 4
    noise = [tuple(item["noise"].tolist()) for item in found]
    assert (len(set(noise)), noise[0]) == (3, noise[3])
    assert noise[0] == tuple(seen(stream_of(Labelled(), seed=3), Position())[6])
    assert len(set(order_of("balanced", samples=36)(1).tolist())) == 36
    narrow = order_of("tests.data.test_order.repeated")(0)
    assert narrow.tolist() == [0, 15, 24, 36, 51] and narrow.dtype == np.int64


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("range", "for epoch 1, indices from 0 to 12, but the dataset has 12 samples"),
        ("type", "type float64, not a list of indices"),
        ("empty", "shape \\(0,\\)"),
        ("length", "for epoch 2, 11 samples, but 12 in the first"),
    ],
)
def test_wrong_indices_are_refused(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        order_of(f"{HERE}.wrong", kind=kind)(1)


def test_what_an_order_needs_of_the_data_set() -> None:
    with pytest.raises(UserError, match="weighted needs an attribute or method weights of Noisy"):
        order_of("weighted", Noisy())
    with pytest.raises(UserError, match="balanced needs an attribute or method targets or labels of Noisy"):
        order_of("balanced", View(Noisy(), limit=4))
    short = Labelled()
    short.size = 13
    with pytest.raises(UserError, match=r"targets of Labelled has the shape \(12,\), not \(13,\)"):
        order_of("balanced", short)
    assert order_of("balanced", View(Labelled(), limit=3))(0).max() < 3 * 3


def test_global_generators_are_seeded() -> None:
    """An order that draws from them is the same on every rank, and leaves those of the loop alone."""
    torch.manual_seed(1), np.random.seed(1)
    first = order_of(f"{HERE}.unseeded")(2)
    np.random.seed(2)
    expected = np.random.get_state()[1].tolist()
    assert first.tolist() == order_of(f"{HERE}.unseeded")(2).tolist() != order_of(f"{HERE}.unseeded")(3).tolist()
    assert np.random.get_state()[1].tolist() == expected


@pytest.mark.slow
def test_weights_of_the_epoch(runs: Runs) -> None:
    """The order sees the dataset as it is in that epoch, also if only workers read."""
    data = ["--dataset.train", f"{{type: {HERE}.Curriculum}}", "--loader.order", "{type: weighted, samples: 64}"]
    alone = final(runs.train(*words("plain", *data), name="alone"))
    shared = final(runs.train(*words("plain", *data, "--num_workers", "2"), name="shared"))
    assert same(alone["latest"]["model"], shared["latest"]["model"])
    digits = Curriculum(PROJECT / "data", "train")
    weighted = order_of("weighted", digits)
    for epoch in (0, 1):
        assert digits.labels[weighted(epoch) % len(digits)].max() == 3 * (epoch + 1)


@pytest.mark.slow
def test_ranks_with_other_orders_are_refused(runs: Runs) -> None:
    report = refused(runs, 2, runs.words(*words("plain", "--loader.order", f"{{type: {HERE}.of_this_process}}")))
    assert "rank 1 has a different loader.order than rank 0" in report


def test_an_order_that_is_not_there(runs: Runs) -> None:
    report = "did you mean balanced.*custom/.../<name>_order.py"
    with pytest.raises(UserError, match=report):
        runs.train("--loader.order.type", "balance")
    with pytest.raises(UserError, match=r"loader\.order\.samples = 0"):
        runs.train("--loader.order", "{type: weighted, samples: 0}")
    stream = "{type: tests.parts.streams.test_streams.Stream}"
    with pytest.raises(UserError, match="Stream is an iterable dataset, so it cannot be balanced"):
        runs.train("--loader.order.type", "balanced", "--dataset.train", stream)
    runs.train("--loader.order.type", "sequential", "--dataset.train", stream, "--progress.max_steps", "1")
