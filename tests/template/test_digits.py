"""The embedded data are the ones they claim to be."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support import REPO, TEMPLATE

SHIPPED = TEMPLATE / "data" / "digits.npz"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_digits", REPO / "tools" / "make_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shipped_file_is_small_and_complete() -> None:
    assert SHIPPED.stat().st_size < 100_000
    with np.load(SHIPPED, allow_pickle=False) as arrays:
        assert {name: (arrays[name].dtype.name, arrays[name].shape) for name in arrays} == {
            "images": ("uint8", (1797, 8, 8)),
            "labels": ("uint8", (1797,)),
            "split": ("uint8", (1797,)),
        }
        assert np.bincount(arrays["split"]).tolist() == [1200, 300, 297]
        assert arrays["images"].max() == 16
        for part in range(3):  # stratified: about a tenth of every part is each digit
            share = np.bincount(arrays["labels"][arrays["split"] == part]) / (arrays["split"] == part).sum()
            assert np.abs(share - 0.1).max() < 0.01


def test_shipped_arrays_equal_the_source(maker: ModuleType) -> None:
    """Made again from scikit-learn's copy, with the seed in the script."""
    pytest.importorskip("sklearn", reason="scikit-learn ships the source of the digits")
    images, labels = maker.load_source()
    with np.load(SHIPPED, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["images"], images)
        assert np.array_equal(arrays["labels"], labels)
        assert np.array_equal(arrays["split"], maker.draw_split(labels))


def test_writing_twice_gives_the_same_bytes(maker: ModuleType, tmp_path: Path) -> None:
    with np.load(SHIPPED, allow_pickle=False) as arrays:
        loaded = {name: arrays[name] for name in arrays}
    maker.write(tmp_path / "a.npz", loaded)
    maker.write(tmp_path / "b.npz", loaded)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
