"""Any task: what it learns or remembers is trained and saved with it, and its numbers depend on nothing else."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.base.errors import UserError
from common.checkpoint.folder import CheckpointFolder
from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Picture
from common.trainer import Trainer
from engine.conftest import PICTURES
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several
from tests.small import Plain
from tests.test_task import PLAIN, apart, log, of
from custom.tasks.classification_task import ClassificationTask

HERE = "engine.test_task"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_it_as_one(runs: Runs, strategy: str) -> None:
    """In 64 bits, so that only a mistake shows."""
    given = [*of("Remembering"), *PLAIN, "--precision.mode", "fp64", "--optim.accumulate", "2"]
    alone = runs.train(*given, "--batch_size", "16", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "8", "--dist.strategy", strategy, name="two"))
    apart(load(alone), load(runs.root / "two"))


def test_names_are_distinguished(runs: Runs) -> None:
    with pytest.raises(UserError, match="both have a tensor called scale"):
        runs.train(*of("Remembering"), "--model", f"{{type: {HERE}.Scaled}}")


class Scaled(Plain):
    """Has a parameter with the name of one of `Remembering`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_an_update_without_a_part(runs: Runs) -> None:
    assert runs.fail(*of("Turns"), *PLAIN, "--progress.max_steps", "2") == 2
    assert "the model has no part called first" in log(runs.root / "run")


@pytest.mark.slow
def test_a_mean_over_words_of_two_processes(runs: Runs) -> None:
    given = [*of("Tokens"), *PLAIN, "--precision.mode", "fp64"]
    alone = runs.train(*given, "--batch_size", "32", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "8", "--optim.accumulate", "2", name="two"))
    apart(load(alone), load(runs.root / "two"))
    for event in ("train", "val"):
        one, two = (metrics(runs.root / name, event)[-1]["values"]["loss"] for name in ("alone", "two"))
        assert one == pytest.approx(two, rel=1e-12)


class Noisy(Plain):
    """Draws numbers in evaluation too, as a model of diffusion does."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image + torch.randn_like(image))


NOISY = ["--model", f"{{type: {HERE}.Noisy}}"]


def test_evaluation_does_not_change_training(runs: Runs) -> None:
    """D6: however often it is done, and whatever is drawn in it; the same is drawn each time."""
    often = load(runs.train(*NOISY, "--progress.epoch_val", "1step", name="often"))
    rarely = load(runs.train(*NOISY, "--progress.epoch_val", "2epoch", "--pictures.number", "3", name="rare"))
    assert same(often["model"], rarely["model"]) and often["values"] == rarely["values"]


@pytest.mark.slow
def test_what_an_evaluation_draws(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """D6: the same to the last digit with any number of processes, and in evaluate.py."""
    folder = runs.train(*NOISY, "--dataset.val.eval_batch_size", "16")
    file = folder / "checkpoints" / "latest.pt"
    alone = evaluated(file, "--split", "val")["values"]
    assert alone == metrics(folder, "val")[-1]["values"]
    for world in (2, 3):
        target = str(runs.root / f"on{world}")
        argv = ["--model_pt", str(file), "--split", "val", "--dir.eval_dir", target]
        several(runs, world, argv, program="evaluate")
        found = next(Path(target).rglob("metrics.json"))
        assert f'"loss": {alone["loss"]!r}' in found.read_text()


class Mistaken(ClassificationTask):
    """Breaks in one of its methods that only an evaluation calls."""

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory, where: str) -> None:
        super().__init__(model, loss, metric)
        self.where = where

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = super().post_process(output, batch)
        return found if self.where != "post_process" else {"prediction": batch["labels"]}

    def pictures(self, output: dict[str, Any], batch: dict[str, Tensor], limit: int) -> list[Picture]:
        assert self.where != "pictures" or output["predictions"] is not None
        return []


@pytest.mark.parametrize(("where", "missing"), [("post_process", "labels"), ("pictures", "predictions")])
def test_mistakes_of_an_evaluation_show_before_training(runs: Runs, where: str, missing: str) -> None:
    """D8: not after an epoch."""
    assert runs.fail(*of(f"{HERE}.Mistaken", where=where), *PICTURES) == 1
    said = log(runs.root / "run")
    assert f"KeyError: '{missing}'" in said and "in trying a batch of val before training" in said
    assert not (runs.root / "run" / "metrics.jsonl").exists()


class NoLoss(ClassificationTask):
    """Has a loss in training only, as a GAN has."""

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        return super().losses(output, batch) if self.training else {}


class Unseen(ClassificationTask):
    """Shows something."""

    def inspect(self, show: object) -> None:
        raise NotImplementedError


def test_inspect_needs_a_part(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, not ignored, in a project without it."""
    monkeypatch.setattr("common.base.parts.installed", list)
    with pytest.raises(UserError, match="inspect of the task needs parts/inspect"):
        runs.train(*of(f"{HERE}.Unseen"))


def test_no_loss_in_validation(runs: Runs) -> None:
    assert runs.fail(*of(f"{HERE}.NoLoss")) == 2
    assert "best.metric: loss was not measured on this batch; available: Accuracy" in log(runs.root / "run")
    folder = runs.train(*of(f"{HERE}.NoLoss"), "--best.metric", "Accuracy", name="named")
    assert metrics(folder, "val")[-1]["values"].keys() == {"Accuracy"}


@pytest.mark.slow
def test_metrics_of_training_on_two_processes(runs: Runs) -> None:
    given = ["--progress.train_metric", "true", *PLAIN, "--precision.mode", "fp64"]
    runs.train(*given, "--batch_size", "32", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "16", name="two"))
    one, two = (
        [each["values"]["Accuracy"] for each in metrics(runs.root / name, "train")] for name in ("alone", "two")
    )
    assert one == two and len(one) == 5


def leave_names(trainer: Trainer) -> None:
    """A plug-in that leaves the names of the task's parts."""
    parts: Iterable[str] = [name for name, _ in trainer.task.named_modules()]
    (trainer.paths.root / "names.txt").write_text("\n".join(parts))


def test_patterns_name_parts_of_the_task(runs: Runs) -> None:
    """Those of the model by its own names, all others by theirs."""
    given = [*of("Remembering"), *PLAIN, "--prepare.freeze", "[layers.1.*, scale]"]
    folder = runs.train(*given, "--plugins", f"[{HERE}:leave_names]")
    assert {"layers.1", "teacher.layers.1"} <= set((folder / "names.txt").read_text().split())
    end = load(folder)
    assert end["task"]["scale"] == 1
    assert end["optimizer"]["param_groups"][0]["param_names"] == ["layers.3.weight", "layers.3.bias"]


@pytest.mark.slow
def test_a_config_of_before_is_accepted(runs: Runs) -> None:
    """A key that is newer than the checkpoint had the effect of its default; a part that is newer is a change."""
    words = [*PLAIN, "--task.type", "ClassificationTask"]  # the default
    folder = CheckpointFolder(runs.train(*words, "--progress.max_steps", "3") / "checkpoints")
    state = load(runs.root / "run")
    del state["about"]["config"]["task"], state["about"]["config"]["optim"]["no_decay"]
    folder.save(state)
    runs.train(*words, "--resume", "auto", "--progress.max_steps", "4")
    state["about"]["config"]["loss"] = {"other": {"type": "CrossEntropyLoss"}}
    folder.save(state)
    assert runs.fail(*words, "--resume", "auto", "--loss.other.type", "CrossEntropyLoss") == 2
    assert "  loss.CrossEntropyLoss None -> {" in log(runs.root / "run")
