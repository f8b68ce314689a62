"""Any task: what it learns or remembers is trained and saved with it, and its numbers depend on nothing else."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.config import ConfigError
from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Task, fixed
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several
from tests.resume import same_after_cut
from tests.samples import Classification, Digits

HERE = "tests.test_task"
PLAIN = ["--model", "{type: tests.small.Plain}"]


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def of(task: str, **settings: Any) -> list[str]:
    """Return the words that choose a task: of this file, or by its import path."""
    chosen = {"type": task if "." in task else f"{HERE}.{task}", **settings}
    return ["--task", "{" + ", ".join(f"{key}: {value}" for key, value in chosen.items()) + "}"]


class Remembering(Classification):
    """A teacher that follows the model, a queue, a head of its own, and a rate that depends on the step."""

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory, decay: float = 0.9) -> None:
        super().__init__(model, loss, metric)
        self.decay = decay
        self.teacher = fixed(copy.deepcopy(model))
        self.scale = nn.Parameter(torch.ones(1))
        self.queue: Tensor
        self.register_buffer("queue", torch.zeros(4))

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        with torch.no_grad():
            wanted = self.teacher(batch["image"])
        losses = super().losses({"logits": output["logits"] * self.scale}, batch)
        distance = functional.mse_loss(output["logits"], wanted)
        return {**losses, "loss": losses["loss"] + 0.1 * distance, "distance": distance}

    @torch.no_grad()
    def after_step(self) -> None:
        assert not self.teacher.training
        for mine, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)
        self.queue.copy_(torch.roll(self.queue, 1))
        self.queue[0] = self.at.step + self.at.epoch / 10 + (self.at.total or 0) / 1000


def test_a_task_is_chosen_in_the_config(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """D15: by name or import path, with settings that are checked like all others; evaluate.py builds the same."""
    folder = runs.train(*of("Remembering", decay=0.5), *PLAIN)
    measured = metrics(folder, "val")[-1]["values"]
    assert measured["distance"] > 0
    assert evaluated(folder / "checkpoints" / "latest.pt", "--split", "val")["values"] == measured
    assert re.search(r"task tests.test_task.Remembering tests/test_task.py:\d+", log(folder))
    with pytest.raises(ConfigError, match=r"task\.threshold"):
        runs.train("--task", "{type: tests.samples.Classification, threshold: 0.5}")


def test_what_a_task_remembers_is_resumed(runs: Runs) -> None:
    """D1: weights, buffers and a teacher of the task itself, in the optimizer and the checkpoint."""
    given = [*of("Remembering"), *PLAIN]
    end = load(same_after_cut(runs, "warm-up", *given)[0])
    assert end["task"].keys() == {"scale", "queue", *(f"teacher.{name}" for name in end["model"])}
    assert end["task"]["queue"].tolist() == pytest.approx([9.11, 8.11, 7.11, 6.11])  # step, epoch and total
    assert end["task"]["scale"] != 1
    assert [name for name in end["optimizer"]["param_groups"][0]["param_names"] if "." not in name] == ["scale"]
    assert not any(name.startswith("model.") for name in [*end["model"], *end["task"]])


def apart(first: dict[str, Any], second: dict[str, Any], atol: float = 1e-12) -> None:
    """Check that all weights of two checkpoints differ by rounding at most."""
    for part in ("model", "task"):
        assert first[part].keys() == second[part].keys()
        for key, value in first[part].items():
            torch.testing.assert_close(second[part][key], value, rtol=0, atol=atol)


class Pair(nn.Module):
    """A model of two parts that are trained by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)


class Turns(Task):
    """The first part is trained in each step, the second in every other one, against the first."""

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = batch["image"].flatten(1)
        return {"logits": self.model.first(image), "other": self.model.second(image)}  # type: ignore[operator]

    def updates(self) -> Sequence[str]:
        return ("first", "second") if self.at.step % 2 else ("first",)

    def update(self, name: str, batch: dict[str, Tensor]) -> Losses:
        output = self.output(batch)
        if name == "first":
            return super().update(name, batch)
        loss = functional.mse_loss(output["other"], output["logits"])
        return {"loss": loss, "gap": loss.detach().sqrt()}


TURNS = [*of("Turns"), "--model", f"{{type: {HERE}.Pair}}", "--metric", "{$REPLACE: true}", "--optim.weight_decay", "1"]


def test_updates_train_their_own_parts(runs: Runs) -> None:
    """One optimizer: what an update does not train gets no decay and no moments from it."""
    folder = runs.train(*TURNS, "--progress.max_steps", "1", "--progress.log_every", "1")
    first = load(folder)
    names = first["optimizer"]["param_groups"][0]["param_names"]
    assert {names[number] for number in first["optimizer"]["state"]} == {"first.weight", "first.bias"}
    folder = runs.train(*TURNS, "--progress.max_steps", "2", "--progress.log_every", "1", name="two")
    state = load(folder)["optimizer"]["state"]
    assert {names[number]: int(each["step"]) for number, each in state.items()} == {
        "first.weight": 2, "first.bias": 2, "second.weight": 1, "second.bias": 1
    }  # fmt: skip
    assert metrics(folder, "train")[1]["values"].keys() >= {"first", "second", "gap"}
    assert load(folder)["model"]["second.weight"].ne(first["model"]["second.weight"]).all()


def test_updates_are_resumed(runs: Runs) -> None:
    same_after_cut(runs, "warm-up", *TURNS)


BF16 = ["--precision.mode", "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--precision.mode", "fp64"], ["--precision.mode", "fp64", "--optim.clip_gradients", "0.1"], BF16], ids=str
)
def test_updates_on_two_processes(runs: Runs, more: list[str]) -> None:
    """Each with an exchange of its own, of what it trains: no unused parameters to look for."""
    given = [*TURNS, "--optim.accumulate", "2", *more]
    alone = runs.train(*given, "--batch_size", "16", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "8", name="two"))
    if more != BF16:
        apart(load(alone), load(runs.root / "two"))


class Tokens(Classification):
    """A loss that is a mean over pixels that are not black, as a language model's is over words."""

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        mask = batch["image"] > 0
        each = functional.cross_entropy(output["logits"], batch["label"], reduction="none")
        return {"loss": (each[:, None, None, None] * mask).sum() / mask.sum()}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["image"] > 0).sum())


class Uncounted(Tokens):
    """As a mean over samples; what went wrong in many trainers."""

    def count(self, batch: dict[str, Tensor]) -> int:
        return len(batch["image"])


def test_a_mean_over_words(runs: Runs) -> None:
    """D7: training and validation do not depend on how samples are cut into batches."""
    folders = {}
    for task in ("Tokens", "Uncounted"):
        for batch, accumulate, evaluated in ((32, 1, 160), (16, 2, 7)):
            given = ["--batch_size", str(batch), "--optim.accumulate", str(accumulate), "--precision.mode", "fp64"]
            given += ["--dataset.val.eval_batch_size", str(evaluated), *of(task), *PLAIN]
            folders[task, batch] = runs.train(*given, name=f"{task}{batch}")
    apart(load(folders["Tokens", 32]), load(folders["Tokens", 16]), atol=1e-14)
    values = [metrics(folders["Tokens", batch], "val")[-1]["values"]["loss"] for batch in (32, 16)]
    assert values[0] == pytest.approx(values[1], rel=1e-14)
    with pytest.raises(AssertionError):
        apart(load(folders["Uncounted", 32]), load(folders["Uncounted", 16]), atol=1e-5)


class Entropy(Task):
    """Computes its own loss, and a further value."""

    def output(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["image"])

    def losses(self, output: Tensor, batch: dict[str, Tensor]) -> Losses:
        loss = functional.cross_entropy(output, batch["label"])
        return {"loss": loss, "entropy": -(output.log_softmax(1).exp() * output.log_softmax(1)).sum(1).mean()}


class OnlyLoss(Entropy):
    """The same without the further value."""

    def losses(self, output: Tensor, batch: dict[str, Tensor]) -> Losses:
        return {"loss": super().losses(output, batch)["loss"]}


def test_a_further_value_is_logged(runs: Runs) -> None:
    """In training and validation, by name; nothing more is minimised."""
    given = ["--loss", "null", "--metric", "{$REPLACE: true}", "--progress.max_steps", "4"]
    folder = runs.train(*of("Entropy"), *given)
    assert re.search(r"loss \S+ \(\S+\)  entropy \S+ \(\S+\)", log(folder))
    for event in ("train", "val"):
        assert metrics(folder, event)[-1]["values"]["entropy"] > 0
    other = runs.train(*of("OnlyLoss"), *given, name="other")
    assert same(load(folder)["model"], load(other)["model"])


def test_a_task_without_a_loss(runs: Runs) -> None:
    """The config names none, and the task computes none."""
    assert runs.fail("--loss", "null", "--best.metric", "Accuracy") == 2
    assert "Classification has no `loss` to minimise in update all" in log(runs.root / "run")
    with pytest.raises(ConfigError, match="or be null, if the task computes its own"):
        runs.train("--loss", "{$REPLACE: true}", name="empty")


def test_metrics_of_training(runs: Runs) -> None:
    """On the definitions of validation: of the last step's samples, in evaluation mode, on every line."""
    given = ["--progress.train_metric", "true", "--debug.max_samples", "32", "--optim.lr", "1e-12"]
    folder = runs.train(
        *given, "--dataset.val", "{type: tests.samples.Digits}", "--dataset.train", "{type: tests.samples.Digits}"
    )
    same_samples = runs.train(*given, "--dataset.val", f"{{type: {HERE}.TrainDigits}}", name="same")
    measured = metrics(same_samples, "val")[-1]["values"]["Accuracy"]
    assert metrics(folder, "train")[-1]["values"]["Accuracy"] == measured
    assert re.search(r"\| Accuracy \S+ ", log(folder))


def TrainDigits(data_dir: Path, mode: str, **arguments: Any) -> Any:
    """Return the training samples, as validation data."""

    return Digits(data_dir, "train", **arguments)
