"""Metrics of torchmetrics by import path: on 1 to 3 processes the value of one object that sees everything."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import TEMPLATE, fresh
from test_data_tools import ported

pytestmark = pytest.mark.slow

# Boxes that depend on the model, several or none per image, as lists of a tensor each.
TASK = """
import torch
from common.config.registry import TASK_REGISTRY
from common.task import Task

def boxes(centers, labels, **more):
    return {"boxes": torch.cat([centers, centers + 4], 1), "labels": labels, **more}

@TASK_REGISTRY.register()
class Found(Task):
    def output(self, batch):
        logits = self.model(batch["image"])
        label = batch["label"]
        found, wanted = [], []
        for row, number in zip(logits, label):
            scores, classes = row.softmax(0).topk(int(number) % 4)
            found.append(boxes(classes[:, None].repeat(1, 2).float(), classes, scores=scores))
            wanted.append(boxes(number[None, None].repeat(1, 2).float(), number[None]))
        return {"logits": logits, "found": found, "wanted": wanted, "mean": logits.mean(1), "spread": logits.std(1)}
"""
INPUTS = {"preds": "output.logits", "target": "batch.label"}
CLASSES = {"num_classes": 10, "inputs": INPUTS}
NUMBERS = {"inputs": {"preds": "output.mean", "target": "output.spread"}}
METRICS = {
    "acc": {"type": "torchmetrics.classification.MulticlassAccuracy", **CLASSES},
    "task": {"type": "torchmetrics.Accuracy", "task": "multiclass", "average": "none", **CLASSES},
    "f1": {"type": "torchmetrics.F1Score", "task": "multiclass", "average": "macro", **CLASSES},
    "auroc": {"type": "torchmetrics.AUROC", "task": "multiclass", "thresholds": 20, **CLASSES},
    "confusion": {"type": "torchmetrics.ConfusionMatrix", "task": "multiclass", **CLASSES},
    "mse": {"type": "torchmetrics.MeanSquaredError", **NUMBERS},
    "pearson": {"type": "torchmetrics.PearsonCorrCoef", **NUMBERS},  # its state is merged by a formula of its own
    "mean": {"type": "torchmetrics.MeanMetric", "inputs": {"value": "output.mean", "weight": "output.spread"}},
    "map": {
        "type": "torchmetrics.detection.MeanAveragePrecision",
        "class_metrics": True,
        "inputs": {"preds": "output.found", "target": "output.wanted"},
    },
}
# The same objects over the whole set, without the project's evaluation.
ALONE = """
import json
import torch
from common import build

from common.config import resolve
from common.config.registry import METRIC_REGISTRY
from common.distributed import Rank
from custom.config import Config

config = resolve(Config, ["experiments/tm/config.yaml"], []).config
task = build.build_task(config, Rank(), first_weights=False).eval()
task.load_state_dict(torch.load("experiments/tm/checkpoints/latest.pt", weights_only=True)["model"])
[loader] = build.build_evaluation(config, "val", Rank())
values = {}
objects = {name: METRIC_REGISTRY.build(section, ignore=("inputs",)) for name, section in config.metric.items()}
with torch.no_grad():
    for batch in loader:
        output = task.output(batch)
        for name, section in config.metric.items():
            paths = {key: path.split(".") for key, path in section["inputs"].items()}
            objects[name].update(**{key: {"output": output, "batch": batch}[a][b] for key, (a, b) in paths.items()})
print(json.dumps({name: metric.compute() for name, metric in objects.items()}, default=lambda value: value.tolist()))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ported(tmp_path_factory, "ports", "torchmetrics", "torchmetrics.detection") as python:
        yield python


def rendered(folder: Path) -> Path:
    """Return a fresh project."""
    settings = folder / "config.yaml"
    settings.write_text(f"cookiecutters_dir: {folder}/c\nreplay_dir: {folder}/r\n")
    return fresh(folder, settings)


def call(root: Path, python: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), *words], cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def flat(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        return {name: value}
    return {key: number for part, item in parts for key, number in flat(f"{name}.{part}", item).items()}


def test_on_any_number_of_processes(tmp_path: Path, python: Path) -> None:
    root = rendered(tmp_path)
    (root / "custom" / "tasks" / "found_task.py").write_text(TASK)
    base = {"$BASE": "default.yaml", "name": "tm", "task": {"$REPLACE": True, "type": "Found"}}
    data = {"batch_size": 16, "debug": {"max_samples": 100}, "progress": {"epoch": 3, "epoch_eval": -1}}
    text = json.dumps({**base, **data, "metric": {"$REPLACE": True, **METRICS}, "best": {"metric": "acc"}})
    (root / "configs" / "tm.yaml").write_text(text)  # JSON is YAML
    call(root, python, "train.py", "--config", "configs/tm.yaml")
    alone: dict[str, float] = {}
    for name, value in json.loads(call(root, python, "-c", ALONE)).items():
        alone |= flat(name, value)
    assert len(alone) > 120
    assert alone["acc"] > 0.2
    assert alone["map.map"] > 0
    for count in ("1", "2", "3"):
        words = ["--model_pt", "experiments/tm/checkpoints/latest.pt", "--split", "val", "--dist.processes", count]
        call(root, python, "evaluate.py", *words, "--dir.eval_dir", f"measured{count}")
        values = json.loads((root / f"measured{count}" / "metrics.json").read_text())["values"]
        assert {name: values[name] for name in alone} == alone


def test_the_config_of_the_page(tmp_path: Path, python: Path) -> None:
    page = (TEMPLATE / "docs" / "evaluation.md").read_text()
    start = page.index("# configs/torchmetrics.yaml")
    root = rendered(tmp_path)
    (root / "configs" / "torchmetrics.yaml").write_text(page[start : page.index("```", start)])
    words = ["--progress.max_steps", "3", "--monitor.writers", "[]", "--dist.processes", "2"]
    call(root, python, "train.py", "--config", "configs/torchmetrics.yaml", *words)
