"""Pipelines of albumentations and MONAI, whose transforms hold generators of their own: a resume has the same bits."""

from pathlib import Path

import pytest

from test_data_tools import ported
from test_torchmetrics import call, rendered

pytestmark = pytest.mark.slow

DATASETS = {
    "albumentations": """
        import albumentations as A
        flip, turn = A.HorizontalFlip(p=0.5), A.Rotate(limit=30, p=0.7)
        blurred = A.OneOf([A.GaussNoise(p=1), A.GaussianBlur(p=1)], p=0.5)
        pipeline = A.Compose([flip, turn, A.RandomBrightnessContrast(p=0.5), blurred])
        self.augment = lambda image: pipeline(image=image.transpose(1, 2, 0))["image"].transpose(2, 0, 1)
""",
    "monai": """
        from monai.transforms import Compose, RandFlip, RandGaussianNoise, RandRotate
        turn = RandRotate(range_x=0.5, prob=0.7)
        self.augment = Compose([RandFlip(prob=0.5), turn, RandGaussianNoise(prob=0.5)])
""",
}
DATASET = """
import numpy as np
import torch
from common.config.registry import DATASET_REGISTRY

@DATASET_REGISTRY.register()
class Ported:
    def __init__(self, data_dir, mode):
        self.images = np.random.default_rng(0).random((64, 1, 8, 8)).astype("float32")
{pipeline}
    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = np.ascontiguousarray(self.augment(self.images[index]))
        return {{"image": torch.from_numpy(image).float(), "label": index % 10}}
"""
SMALL = ["--config", "configs/default.yaml", "--dataset.train", "{$REPLACE: true, type: Ported}", "--batch_size", "16"]
SMALL += ["--monitor.writers", "[]", "--progress.epoch_eval", "-1"]


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("albumentations", "2"),
        ("monai", "0"),
        pytest.param("albumentations", "0", marks=pytest.mark.full),
        pytest.param("monai", "2", marks=pytest.mark.full),
    ],
)
def test_a_resume_has_the_same_bits(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str, worker: str
) -> None:
    root = rendered(tmp_path)
    (root / "custom" / "datasets" / "ported_dataset.py").write_text(DATASET.format(pipeline=DATASETS[name]))
    words = [*SMALL, "--num_workers", worker]
    with ported(tmp_path_factory, "ports", name) as python:
        call(root, python, "train.py", *words, "--name", "uncut", "--progress.epoch", "2")
        call(root, python, "train.py", *words, "--name", "cut", "--progress.epoch", "1")
        call(root, python, "train.py", *words, "--name", "cut", "--progress.epoch", "2", "--resume", "auto")
        same = call(root, python, "-m", "tools.same", "experiments/uncut", "experiments/cut")
    log = (root / "experiments" / "cut" / "train.log").read_text()
    assert "this resume is bit-exact as far as compared: " in log
    assert "twice gives two values" not in log
    assert "same: " in same
