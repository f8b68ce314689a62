"""Numbers that a task draws in an evaluation belong to the sample; pictures of training are drawn only where wanted."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.evaluation.metric import GatheredMetric, Results
from common.monitor.pictures import Picture
from common.task import Task
from tests.conftest import Runs, load, metrics, same
from tests.ranks import start_ranks
from custom.tasks.classification_task import ClassificationTask

HERE = __name__


class Sampling(ClassificationTask):
    """Images with noise, drawn three times, and a class drawn for each."""

    plain = False

    def noise(self, x: Tensor) -> Tensor:
        return torch.randn_like(x) if self.plain else self.draw(torch.randn_like, x)

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = batch["image"]
        for _ in range(3):
            image = image + self.noise(image)
        return {"logits": self.model(image), "image": image}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        chosen = self.draw(torch.multinomial, output["image"].flatten(1).softmax(dim=1), 2)
        return {**super().post_process(output, batch), "image": output["image"], "chosen": chosen}


class PlainSampling(Sampling):
    """The same with the numbers of the batch, as of torch alone."""

    plain = True


class TwoRows(Sampling):
    """Draws for each sample twice, at once."""

    def noise(self, x: Tensor) -> Tensor:
        return self.draw(torch.randn_like, x.repeat(2, 1, 1, 1))[: len(x)]


class Drawn(GatheredMetric):
    """All digits of what was drawn."""

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        return {"image": output["image"].flatten(1), "chosen": output["chosen"]}

    def compute(self, results: Results) -> dict[str, float]:
        return {"image": float(results["image"].double().sum()), "chosen": float(results["chosen"].double().std())}


WORDS = ["--metric", f"{{$REPLACE: true, Drawn: {{type: {HERE}.Drawn}}}}", "--best.metric", "Drawn.image"]
WORDS += ["--debug.max_samples", "40", "--batch_size", "20", "--progress.epoch", "1", "--num_workers", "0"]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_drawn_belongs_to_the_sample(runs: Runs, evaluated: Callable[..., dict[str, Any]], world: int) -> None:
    """The same digits with any `eval_batch_size`, in training and evaluate.py; each draw is another one."""
    folder = runs.train(*WORDS, "--task", f"{{type: {HERE}.Sampling}}", "--dataset.val.eval_batch_size", "40")
    path = folder / "checkpoints" / "latest.pt"
    values = [metrics(folder, "val")[-1]["values"]]
    for size in ("1", "7", "40"):
        words = ["--model_pt", str(path), "--split", "val", "--dataset.val.eval_batch_size", size]
        if world == 1:
            found = evaluated(path, *words[2:])
        else:
            assert set(start_ranks(runs.root, world, words, program="evaluate").codes) == {0}
            found = json.loads((folder / "eval" / "latest_val" / "metrics.json").read_text())
        values.append(found["values"])
    assert len({(each["Drawn.image"], each["Drawn.chosen"]) for each in values}) == 1
    assert values[0]["Drawn.image"] != 0


def test_in_training_draw_is_the_function_itself(runs: Runs) -> None:
    """The loop's random numbers; plain torch in an evaluation depends on the batch, which the guide says."""
    folders = [
        runs.train(
            *WORDS, "--task", f"{{type: {HERE}.{kind}}}", "--dataset.val.eval_batch_size", size, name=kind + size
        )
        for kind, size in (("Sampling", "40"), ("PlainSampling", "40"), ("PlainSampling", "7"))
    ]
    states = [load(folder) for folder in folders]
    assert same(states[0]["model"], states[1]["model"]) and same(states[1]["model"], states[2]["model"])
    measured = [metrics(folder, "val")[-1]["values"]["Drawn.image"] for folder in folders]
    assert len(set(measured)) == 3


def test_rows_that_are_no_samples(runs: Runs) -> None:
    """Refused in the sanity check."""
    assert runs.fail(*WORDS, "--task", f"{{type: {HERE}.TwoRows}}") == 2
    assert "TwoRows.draw: x has 80 rows, but the batch has 40 samples" in (runs.root / "run" / "train.log").read_text()


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
    "--progress.iter_save_progress",
    "3",
]
ALONE += ["--metric", "{$REPLACE: true}"]


def test_no_output_for_pictures_that_are_not_drawn(runs: Runs) -> None:
    """With val: null nothing else calls `output`. A task with pictures is tried before the first step."""
    folder = runs.train(*ALONE, "--task", f"{{type: {HERE}.Quiet}}")
    assert load(folder)["position"]["step"] == 10
    assert "training pictures  never (the task draws none)" in (folder / "train.log").read_text()
    assert runs.fail(*ALONE, "--task", f"{{type: {HERE}.Drawing}}", name="drawing") == 1
    log = (runs.root / "drawing" / "train.log").read_text()
    assert "in drawing pictures of training data" in log and "before the first step" in log
    assert not list((runs.root / "drawing" / "checkpoints").glob("*.pt"))
    runs.train(*ALONE, "--task", f"{{type: {HERE}.Drawing}}", "--progress.save_progress", "false", name="off")
