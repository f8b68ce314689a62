"""Any task: what it learns or remembers is trained and saved with it, and its numbers depend on nothing else."""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional

from common.base.errors import UserError
from common.checkpoint import write_checkpoint
from common.config import ConfigError
from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.monitor.pictures import Picture
from common.monitor.show import Show
from common.task import Task, fixed
from common.trainer import Trainer
from tests.conftest import Runs, load, metrics, same
from tests.parts import Plain
from tests.ranks import several
from tests.resume import cut, differing, final, same_after_cut, words
from custom.tasks.classification_task import ClassificationTask

HERE = "tests.test_task"
PLAIN = ["--model", "{type: tests.parts.Plain}"]
QUIET = ["--progress.save_progress", "false", "--progress.save_progress_val", "false"]


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def of(task: str, **settings: Any) -> list[str]:
    """The words that choose a task of this file."""
    return ["--task", "{" + ", ".join(f"{k}: {v}" for k, v in {"type": f"{HERE}.{task}", **settings}.items()) + "}"]


class Remembering(ClassificationTask):
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
        runs.train("--task", "{type: ClassificationTask, threshold: 0.5}")
    with pytest.raises(ConfigError, match=r"did you mean ClassificationTask\?"):
        runs.train("--task", "{type: ClasificationTask}")


def test_what_a_task_remembers_is_resumed(runs: Runs) -> None:
    """D1: weights, buffers and a teacher of the task itself, in the optimizer, the average and the checkpoint."""
    given = [*of("Remembering"), *PLAIN]
    end = load(same_after_cut(runs, "ema", *given)[0])
    assert end["task"].keys() == {"scale", "queue", *(f"teacher.{name}" for name in end["model"])}
    assert end["task"]["queue"].tolist() == pytest.approx([9.11, 8.11, 7.11, 6.11])  # step, epoch and total
    assert end["task"]["scale"] != 1
    assert [name for name in end["optimizer"]["param_groups"][0]["param_names"] if "." not in name] == ["scale"]
    assert not any(name.startswith("model.") for name in [*end["ema"]["shadow"], *end["model"], *end["task"]])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_it_as_one(runs: Runs, strategy: str) -> None:
    """In 64 bits, so that only a mistake shows."""
    given = [*of("Remembering"), *PLAIN, "--precision.mode", "fp64", "--optim.accumulate", "2"]
    alone = runs.train(*given, "--batch_size", "16", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "8", "--dist.strategy", strategy, name="two"))
    apart(load(alone), load(runs.root / "two"))


def apart(first: dict[str, Any], second: dict[str, Any], atol: float = 1e-12) -> None:
    """All weights of two checkpoints differ by rounding at most."""
    for part in ("model", "task"):
        assert first[part].keys() == second[part].keys()
        for key, value in first[part].items():
            torch.testing.assert_close(second[part][key], value, rtol=0, atol=atol)


def test_a_checkpoint_of_before_is_read(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """When losses were parts of the model, and `task` no part of a checkpoint."""
    given = ["--loss", "{$REPLACE: true, tests.parts.Learned: {}}", *PLAIN]
    uncut = runs.train(*words("ema", *given), name="uncut")
    cut(runs, "ema", 8, *given)
    file = runs.root / "cut" / "checkpoints" / "latest.pt"
    state = load(runs.root / "cut")
    state["model"] |= state.pop("task")
    write_checkpoint(state, file)
    evaluated(file, "--split", "val")
    assert differing(final(uncut), final(runs.train(*words("ema", *given, "--resume", "auto"), name="cut"))) == []


def test_names_are_told_apart(runs: Runs) -> None:
    with pytest.raises(UserError, match="both have a tensor called scale"):
        runs.train(*of("Remembering"), "--model", f"{{type: {HERE}.Scaled}}")


class Scaled(Plain):
    """Has a parameter with the name of one of `Remembering`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


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
    folder = runs.train(*TURNS, "--progress.max_steps", "1", "--progress.iter_loss", "1", *QUIET)
    first = load(folder)
    names = first["optimizer"]["param_groups"][0]["param_names"]
    assert {names[number] for number in first["optimizer"]["state"]} == {"first.weight", "first.bias"}
    folder = runs.train(*TURNS, "--progress.max_steps", "2", "--progress.iter_loss", "1", *QUIET, name="two")
    state = load(folder)["optimizer"]["state"]
    assert {names[number]: int(each["step"]) for number, each in state.items()} == {
        "first.weight": 2, "first.bias": 2, "second.weight": 1, "second.bias": 1
    }  # fmt: skip
    assert metrics(folder, "train")[1]["values"].keys() >= {"first", "second", "gap"}
    assert load(folder)["model"]["second.weight"].ne(first["model"]["second.weight"]).all()


def test_updates_are_resumed(runs: Runs) -> None:
    given = [*TURNS, *QUIET]
    same_after_cut(runs, "ema", *given)


BF16 = ["--precision.mode", "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--precision.mode", "fp64"], ["--precision.mode", "fp64", "--optim.clip_gradients", "0.1"], BF16], ids=str
)
def test_updates_on_two_processes(runs: Runs, more: list[str]) -> None:
    """Each with an exchange of its own, of what it trains: no unused parameters to look for."""
    given = [*TURNS, *QUIET, "--optim.accumulate", "2", *more]
    alone = runs.train(*given, "--batch_size", "16", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "8", name="two"))
    if more != BF16:
        apart(load(alone), load(runs.root / "two"))


def test_an_update_without_a_part(runs: Runs) -> None:
    assert runs.fail(*of("Turns"), *PLAIN, "--progress.max_steps", "2") == 2
    assert "the model has no part called first" in log(runs.root / "run")


class Tokens(ClassificationTask):
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


@pytest.mark.slow
def test_a_mean_over_words_of_two_processes(runs: Runs) -> None:
    given = [*of("Tokens"), *PLAIN, "--precision.mode", "fp64"]
    alone = runs.train(*given, "--batch_size", "32", name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "8", "--optim.accumulate", "2", name="two"))
    apart(load(alone), load(runs.root / "two"))
    for event in ("train", "val"):
        one, two = (metrics(runs.root / name, event)[-1]["values"]["loss"] for name in ("alone", "two"))
        assert one == pytest.approx(two, rel=1e-12)


class Late(ClassificationTask):
    """Nothing is trained before the fourth step."""

    def rate(self, group: str) -> float:
        assert group == "all"
        return 0.0 if self.at.step < 3 else 0.5


def test_a_group_that_stands_still(runs: Runs) -> None:
    """No decay and no moments; then the rate of the config times the task's."""
    given = [*of("Late"), *PLAIN, "--optim.weight_decay", "0.5", "--progress.iter_loss", "1"]
    start = load(runs.train(*given, "--progress.max_steps", "1", name="one"))["model"]
    still = load(runs.train(*given, "--progress.max_steps", "3", name="three"))
    assert same(start, still["model"]) and still["optimizer"]["state"] == {}
    folder = runs.train(*given, "--progress.max_steps", "4", name="four")
    assert not same(start, load(folder)["model"])
    assert [entry["values"]["lr"] for entry in metrics(folder, "train")] == [0.0, 0.0, 0.0, 0.0005]


class Noisy(Plain):
    """Draws numbers in evaluation too, as a model of diffusion does."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image + torch.randn_like(image))


NOISY = ["--model", f"{{type: {HERE}.Noisy}}", "--progress.save_progress_val", "false"]


def test_evaluation_does_not_change_training(runs: Runs) -> None:
    """D6: however often it is done, and whatever is drawn in it; the same is drawn each time."""
    often = load(runs.train(*NOISY, "--progress.epoch_val", "1step", name="often"))
    rarely = load(
        runs.train(*NOISY, "--progress.epoch_val", "2epoch", "--progress.max_samples_train", "3", name="rare")
    )
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
        return super().pictures(output if self.where != "pictures" else {"nothing": 1}, batch, limit)


@pytest.mark.parametrize(("where", "missing"), [("post_process", "labels"), ("pictures", "prediction")])
def test_mistakes_of_an_evaluation_show_before_training(runs: Runs, where: str, missing: str) -> None:
    """D8: not after an epoch."""
    assert runs.fail(*of("Mistaken", where=where)) == 1
    said = log(runs.root / "run")
    assert f"KeyError: '{missing}'" in said and "in trying a batch of val before training" in said
    assert metrics(runs.root / "run", "train") == []


class Showing(Task):
    """Computes its own loss, and shows what it can."""

    def output(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["image"])

    def losses(self, output: Tensor, batch: dict[str, Tensor]) -> Losses:
        loss = functional.cross_entropy(output, batch["label"])
        return {"loss": loss, "entropy": -(output.log_softmax(1).exp() * output.log_softmax(1)).sum(1).mean()}

    def inspect(self, show: Show) -> None:
        assert not self.training and not torch.is_grad_enabled()
        show.scalars({"norm": next(self.model.parameters()).norm(), "drawn": torch.rand(())})
        show.text("poem", f"at step {self.at.step}\nnothing rhymes")
        show.histogram("weights", next(self.model.parameters()))
        show.image("noise", torch.rand(8, 8).numpy())


class Silent(Showing):
    """The same without showing anything."""

    inspect = Task.inspect


class OnlyLoss(Silent):
    """The same without the further value."""

    def losses(self, output: Tensor, batch: dict[str, Tensor]) -> Losses:
        return {"loss": super().losses(output, batch)["loss"]}


def test_a_task_shows_what_it_wants(runs: Runs) -> None:
    """In the log, in metrics.jsonl and in TensorBoard, by name; training stays as it is, nothing more is minimised."""
    given = ["--loss", "null", "--metric", "{$REPLACE: true}", "--monitor.writers", "[tensorboard]"]
    folder = runs.train(*of("Showing"), *given, "--progress.max_steps", "4")
    assert [entry["step"] for entry in metrics(folder, "task")] == [2, 4]
    assert metrics(folder, "task")[0]["values"].keys() == {"norm", "drawn"}
    assert "poem:\nat step 2\nnothing rhymes" in log(folder)
    assert re.search(r"loss \S+ \(\S+\)  entropy \S+ \(\S+\)", log(folder))
    board = EventAccumulator(str(folder / "event")).Reload().Tags()
    assert {"task/norm", "Train/entropy"} <= set(board["scalars"])
    assert board["histograms"] == ["task/weights"] and "task/noise" in board["images"]
    assert "task/poem/text_summary" in board["tensors"]
    for event in ("train", "val"):
        assert metrics(folder, event)[-1]["values"]["entropy"] > 0
    for task in ("Silent", "OnlyLoss"):
        other = runs.train(*of(task), *given, "--progress.max_steps", "4", name=task)
        assert same(load(folder)["model"], load(other)["model"])


def test_a_task_without_a_loss(runs: Runs) -> None:
    """The config names none, and the task computes none."""
    assert runs.fail("--loss", "null", "--best.metric", "Accuracy") == 2
    assert "Classification has no `loss` to minimise in update all" in log(runs.root / "run")
    with pytest.raises(ConfigError, match="or be null, if the task computes its own"):
        runs.train("--loss", "{$REPLACE: true}", name="empty")


class NoLoss(ClassificationTask):
    """Has a loss in training only, as a GAN has."""

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        return super().losses(output, batch) if self.training else {}


def test_no_loss_in_validation(runs: Runs) -> None:
    assert runs.fail(*of("NoLoss")) == 2
    assert "best.metric is loss, but the task gives no loss in validation" in log(runs.root / "run")
    folder = runs.train(*of("NoLoss"), "--best.metric", "Accuracy", name="named")
    assert metrics(folder, "val")[-1]["values"].keys() == {"Accuracy"}


def test_metrics_of_training(runs: Runs) -> None:
    """On the definitions of validation: of the last step's samples, in evaluation mode, on every line."""
    given = ["--progress.train_metric", "true", "--debug.max_samples", "32", "--optim.lr", "1e-12"]
    folder = runs.train(*given, "--dataset.val", "{type: DigitsDataset}", "--dataset.train", "{type: DigitsDataset}")
    same_samples = runs.train(*given, "--dataset.val", f"{{type: {HERE}.TrainDigits}}", name="same")
    measured = metrics(same_samples, "val")[-1]["values"]["Accuracy"]
    assert metrics(folder, "train")[-1]["values"]["Accuracy"] == measured
    assert re.search(r"\| Accuracy \S+ \| ", log(folder))


def TrainDigits(data_dir: Path, mode: str, **arguments: Any) -> Any:
    """The training samples, as validation data."""
    from custom.datasets.digits_dataset import DigitsDataset

    return DigitsDataset(data_dir, "train", **arguments)


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


def test_a_config_of_before_is_accepted(runs: Runs) -> None:
    """A key that is newer than the checkpoint had the effect of its default; a part that is newer is a change."""
    words = [*PLAIN, "--task.type", "ClassificationTask"]  # the default
    file = runs.train(*words, "--progress.max_steps", "3") / "checkpoints" / "latest.pt"
    state = load(runs.root / "run")
    del state["about"]["config"]["task"], state["about"]["config"]["optim"]["ema"]
    write_checkpoint(state, file)
    runs.train(*words, "--resume", "auto", "--progress.max_steps", "4")
    state["about"]["config"]["loss"] = {"other": {"type": "CrossEntropyLoss"}}
    write_checkpoint(state, file)
    assert runs.fail(*words, "--resume", "auto", "--loss.other.type", "CrossEntropyLoss") == 2
    assert "loss.CrossEntropyLoss: None in the checkpoint" in log(runs.root / "run")
