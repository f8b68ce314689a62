"""Arguments of classes of other packages, as in a config: annotations that are too narrow."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config.registry import DATASET_REGISTRY
from tests.conftest import CONFIG, ErrorOf, Runs

# Annotated as torchvision's transforms are.
MODULE = """
from collections.abc import Sequence
import torch
from torch import nn


class Erase(nn.Module):
    def __init__(self, p: float = 0.5, value: float = 0.0) -> None:
        super().__init__()
        assert value in ("random", [0.1], 0.5), value
        if not 0 <= p <= 1:
            raise ValueError("p should be between 0 and 1")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image


class ToDtype:
    def __init__(self, dtype: dict[str, torch.dtype], scale=False, like: Sequence["Erase"] = ()) -> None:
        self.dtype = getattr(torch, dtype)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        print("a picture is", self.dtype)
        return image.to(self.dtype)
"""
YAML = f"""$BASE: {CONFIG}
dataset:
  train:
    transforms:
      - {{type: far.ToDtype, dtype: float64}}
      - {{type: far.Erase, value: random}}
      - {{type: far.Erase, value: [0.1]}}
      - {{type: far.ToDtype, dtype: float32, like: []}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "far.py").write_text(MODULE)
    (tmp_path / "far.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path / "far.yaml"
    sys.modules.pop("far", None)


def test_a_wrong_annotation_of_another_package(runs: Runs, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The value is passed as it is."""
    runs.train("--config", str(config), "--progress.max_steps", "1")
    shown = capfd.readouterr().out
    assert "a picture is torch.float64" in shown and "a picture is torch.float32" in shown


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("value: random", "valeu: 0.5", "transforms[1].valeu = 0.5 ({}:6) is not an argument of far.Era"),
        ("far.ToDtype, dtype: float64", "far.ToDtype", "transforms[0].dtype ({}:5) is required by"),
        ("far.ToDtype, dtype: float64", "far.ToDtipe", "no attribute 'ToDtipe'; did you mean ToDtype?"),
    ],
)
def test_a_mistake_in_it_is_refused(error_of: ErrorOf, config: Path, old: str, new: str, said: str) -> None:
    """With its line."""
    config.write_text(YAML.replace(old, new))
    assert said.format(config) in error_of("--config", str(config))


def test_arguments_that_a_base_class_takes(config: Path) -> None:
    """`**kwargs` stand for what the base classes name, as in torchvision; not for what no class knows."""
    source = """
class Base:
    def __init__(self, root, mode="train"):
        self.mode = mode


class Kind(Base):
    def __init__(self, root, **kwargs):
        super().__init__(root, **kwargs)
"""
    (config.parent / "near.py").write_text(source)
    built = DATASET_REGISTRY.build({"type": "near.Kind", "root": "x"}, data_dir=1, mode="val")
    assert built.mode == "val"
    (config.parent / "alone.py").write_text("def make(root, **kwargs):\n    return kwargs\n")
    built = DATASET_REGISTRY.build({"type": "alone.make", "root": "x"}, data_dir=1, mode="val")
    assert built == {}  # as datasets.load_dataset, which passes them to what refuses them
