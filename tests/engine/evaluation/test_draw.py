"""Numbers that a dataset draws belong to the sample; pictures of training are drawn only where wanted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.evaluation.metric import GatheredMetric, Results
from common.task import Picture, Task
from engine.conftest import PICTURES
from tests.conftest import Runs, load, metrics
from custom.datasets.digits_dataset import DigitsDataset
from custom.tasks.classification_task import ClassificationTask

HERE = __name__


class Noisy(DigitsDataset):
    """Digits with noise, as the page draws it."""

    def __init__(self, data_dir: Path, mode: str, shift: int = 0) -> None:
        super().__init__(data_dir, mode, shift)
        self.random = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "noise": torch.randn(1, 8, 8)}


class Sampling(ClassificationTask):
    """Digits with the noise of their dataset, or with noise that the task draws."""

    def __init__(self, plain: bool = False, **parts: Any) -> None:
        super().__init__(**parts)
        self.plain = plain

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        noise = torch.randn_like(batch["image"]) if self.plain else batch["noise"]
        return {"logits": self.model(batch["image"] + noise), "noise": noise}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().post_process(output, batch), "noise": output["noise"]}


class Drawn(GatheredMetric):
    """All digits of what was drawn."""

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        return {"noise": output["noise"].flatten(1)}

    def compute(self, results: Results) -> float:
        return float(results["noise"].double().sum())


WORDS = ["--metric", f"{{$REPLACE: true, Drawn: {{type: {HERE}.Drawn}}}}", "--best.metric", "Drawn"]
WORDS += ["--debug.max_samples", "40", "--batch_size", "20", "--progress.epoch", "1", "--num_workers", "0"]
for _split in ("train", "val", "eval"):
    WORDS += [f"--dataset.{_split}.type", f"{HERE}.Noisy"]


@pytest.mark.parametrize("plain", [False, True])
def test_what_a_dataset_draws_belongs_to_the_sample(runs: Runs, evaluated: Any, plain: bool) -> None:
    """The same digits with any `eval_batch_size`, in training and evaluate.py; not so what a task draws."""
    task = f"{{type: {HERE}.Sampling, plain: {str(plain).lower()}}}"
    folder = runs.train(*WORDS, "--task", task, "--dataset.val.eval_batch_size", "40")
    path = folder / "checkpoints" / "latest.pt"
    found = [metrics(folder, "val")[-1]["values"]["Drawn"]]
    for size in ("1", "7", "40"):
        found.append(evaluated(path, "--split", "val", "--dataset.val.eval_batch_size", size)["values"]["Drawn"])
    assert len(set(found)) == (3 if plain else 1)
    assert found[0] != 0


class Quiet(Task):
    """Trains by `update` alone, and draws no pictures."""

    def output(self, batch: dict[str, Tensor]) -> Any:
        raise RuntimeError("this task has no output")

    def update(self, name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.model(batch["image"]), batch["label"])}


class Drawing(Quiet):
    """The same, with pictures."""

    def pictures(self, output: Any, batch: dict[str, Tensor], limit: int) -> list[Picture]:
        return []


ALONE = [
    "--dataset.val",
    "null",
    "--dataset.eval",
    "null",
    "--best.metric",
    "loss",
    "--pictures.every",
    "3",
    *PICTURES,
]
ALONE += ["--metric", "{$REPLACE: true}"]


def test_no_output_for_pictures_that_are_not_drawn(runs: Runs) -> None:
    """With val: null nothing else calls `output`. A task with pictures is tried in the first step."""
    folder = runs.train(*ALONE, "--task", f"{{type: {HERE}.Quiet}}")
    assert load(folder)["position"]["step"] == 10
    assert runs.fail(*ALONE, "--task", f"{{type: {HERE}.Drawing}}", name="drawing") == 1
    log = (runs.root / "drawing" / "train.log").read_text()
    assert "in drawing pictures of training data" in log
    assert not list((runs.root / "drawing" / "checkpoints").glob("*.pt"))
    never = [word if word != "3" else "0" for word in ALONE]
    runs.train(*never, "--task", f"{{type: {HERE}.Drawing}}", name="off")
