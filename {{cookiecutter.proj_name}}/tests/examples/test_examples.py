"""Every example: it reaches its number, a resumed run is the uncut one, and two processes train what one does."""

import json
import os
import signal
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.trainer import Trainer
import train
from tests.conftest import CONFIG, PROJECT, Runs, load, metrics, same
from tests.examples.runs import distance, trained, words
from tests.ranks import start_ranks

# Five steps in an epoch. What is measured and saved does not fall together with the ends of epochs.
SHORT = ("--debug.max_samples", "160", "--batch_size", "32")
STEPS, STOPPED, KILLED = 12, 4, 8
OFTEN = (
    "--progress.epoch", "null", "--progress.max_steps", str(STEPS), "--progress.log_every", "1",
    "--progress.epoch_val", "4step", "--progress.epoch_eval", "6step", "--progress.epoch_save_latest", "3step",
    "--checkpoint.background", "false", "--plugins", "[tests.examples.test_examples:interrupted]",
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """How an example is tested.

    Attributes:
        value: of the last validation, by name.
        bound: what it reaches.
        lower: whether it must be below the bound, not above.
        short: words for an epoch of a few steps of 32 samples.
        alone: words for the comparison with two processes.
    """

    value: str
    bound: float
    lower: bool = False
    short: tuple[str, ...] = SHORT
    alone: tuple[str, ...] = ()


TINY_TEXT = "type: examples.language_model.data.Text, context: 16, length: 2844"
TINY_GPT = (
    "--dataset.train", f"{{{TINY_TEXT}}}", "--dataset.val", f"{{{TINY_TEXT}, eval_batch_size: 8}}",
    "--model", "{width: 16, heads: 2, context: 16, dropout: 0.2}", "--task.length", "20", "--batch_size", "32",
    "--optim.lr_scheduler.warmup", "2step",
)  # fmt: skip
SHORT_STREAM = ("--dataset.train.records", "160", "--batch_size", "32", "--optim.lr_scheduler.warmup", "2step")
# The first run is stopped in the first stage and killed in the second.
SHORT_STAGES = (
    *SHORT, "--stages", "[{until: 1, freeze: [backbone.*]}, {}]", "--optim.lr_scheduler.warmup", "2step",
)  # fmt: skip
# What depends on which images share a batch: batch norm, mixup.
UNMIXED = ("--prepare.freeze", "[features.*.1.*]", "--loader.collate", "null", "--model.dropout", "0")
EXAMPLES = {
    "boxes": Example("AP50", 0.94),
    "distillation": Example("Accuracy", 0.97, alone=("--prepare.freeze", "[features.0.1.*]")),  # its batch norm
    "gan": Example("NearestReal.recognised", 0.94),
    "language_model": Example("loss", 1.65, lower=True, short=TINY_GPT, alone=("--model.dropout", "0")),
    "metric_learning": Example("RecallAt1", 0.95),
    "model_from_string": Example("Accuracy", 0.97, alone=("--model.layers", "f l32 r l10")),
    "regression": Example("R2", 0.89),
    "reinforcement": Example("MeanLength", 195, short=("--dataset.train.episodes", "160", "--batch_size", "32")),
    "segmentation": Example("MeanIoU", 0.88),
    "self_supervised": Example("RecallAt1", 0.90),
    "stages": Example("Accuracy", 0.96, short=SHORT_STAGES),
    "stream": Example("loss", 0.002, lower=True, short=SHORT_STREAM),
    "text": Example("Accuracy", 0.99),
    "vision_recipe": Example("Accuracy", 0.97, alone=UNMIXED),
}
NEED_MORE = {"hugging_face", "lora"}  # packages that the project does not require: the template tests them
# What the trainer offers, in words; and on how many processes.
WAYS = {
    "ddp": (2, ()),
    "fsdp": (2, ("--dist.strategy", "fsdp")),
    "accumulate": (1, ("--optim.accumulate", "2", "--batch_size", "16")),
    "bf16": (1, ("--precision.mode", "bf16")),
    "compile": (1, ("--prepare.compile", "{enabled: true, backend: aot_eager}")),
}
BLOCKS = {"gan": "[generator, discriminator]", "language_model": "[blocks.*]"}  # for fsdp


def merged(*pairs: str) -> list[str]:
    """Pairs of an option and its value, of which later ones replace earlier ones."""
    return [word for pair in dict(zip(pairs[::2], pairs[1::2], strict=True)).items() for word in pair]


def interrupted(trainer: Trainer) -> None:
    """Send a signal after a step, as a plugin; the environment has the step and the number of the signal."""
    at, number = map(int, os.environ.get("SIGNAL_AFTER", "0 0").split())

    def interrupt() -> None:
        if trainer.at.step == at:
            os.kill(os.getpid(), number)

    trainer.monitor.after_step.append(interrupt)


def all_of(folder: Path) -> dict[str, Any]:
    """Return all that a run ends with: every part of the last checkpoint, and every number that was measured."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    measured = [row for row in rows if row["event"] not in ("run", "checkpoint", "speed", "end")]
    assert len(measured) > STEPS
    state = load(folder)
    del state["fingerprint"]["packages"]  # those imported by then: torch.compile imports more, and not always
    del state["fingerprint"]["data"]  # how many samples were read in time
    return {**state, "about": None, "measured": measured}


def differing(first: Path, second: Path) -> list[str]:
    one, other = all_of(first), all_of(second)
    assert one.keys() == other.keys()
    return [part for part in one if not same(one[part], other[part])]


def cut(runs: Runs, name: str, after: int, number: signal.Signals, *more: str, processes: int = 1) -> None:
    """Train in other processes until a signal arrives in each of them after step `after`."""
    line = words(runs, f"{name}/config", *more, name="cut")
    ended = start_ranks(runs.root, processes, line, environment={"SIGNAL_AFTER": f"{after} {number.value}"})
    expected = -number if number == signal.SIGKILL else 128 + number
    assert set(ended.codes) == {expected}, "\n".join(ended.texts)


def teacher(runs: Runs, name: str, *more: str) -> tuple[str, ...]:
    """Words for the example that needs the run of configs/default.yaml, which is trained first; none for others."""
    if name != "distillation":
        return ()
    line = ["--config", str(CONFIG), "--dir.runs_dir", str(runs.root), "--monitor.writers", "[]", *more]
    assert train.main([*line, "--progress.epoch_eval", "-1", "--name", "default"]) == 0
    path = str(runs.root / "default" / "checkpoints" / "best.pt")
    return ("--task.weights", path, "--init_from.path", path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "regression" else pytest.mark.slow) for name in EXAMPLES]
)
def test_it_reaches_its_number(runs: Runs, name: str) -> None:
    """With its own config, on one core."""
    folder = trained(runs, f"{name}/config", *teacher(runs, name))
    reached = metrics(folder, "val")[-1]["values"][EXAMPLES[name].value]
    assert reached <= EXAMPLES[name].bound if EXAMPLES[name].lower else reached >= EXAMPLES[name].bound


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_resumed_to_the_bit(runs: Runs, name: str) -> None:
    """Stopped inside an epoch, resumed, killed between two checkpoints, resumed: the same weights, rows, everything."""
    more = merged(*OFTEN, *EXAMPLES[name].short, *teacher(runs, name, "--progress.epoch", "1"))
    whole = trained(runs, f"{name}/config", *more, name="whole")
    cut(runs, name, STOPPED, signal.SIGTERM, *more)
    cut(runs, name, KILLED, signal.SIGKILL, *more, "--resume", "auto")
    assert load(runs.root / "cut")["position"]["step"] == KILLED - 1 - (KILLED - 1) % 3
    resumed = trained(runs, f"{name}/config", *more, "--resume", "auto", name="cut")
    assert differing(whole, resumed) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_two_processes_train_what_one_does(runs: Runs, name: str) -> None:
    """With half the batch each, in fp64: the largest difference of any weight."""
    example = EXAMPLES[name]
    more = [*OFTEN, *example.short, *example.alone, "--precision.mode", "fp64"]
    more = merged(*more, *teacher(runs, name, "--progress.epoch", "1"))
    one = trained(runs, f"{name}/config", *more, name="one")
    trained(runs, f"{name}/config", *merged(*more, "--batch_size", "16"), name="two", processes=2)
    assert distance(one, runs.root / "two") <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [*product(["gan", "metric_learning", "language_model"], WAYS), ("stream", "ddp"), ("distillation", "fsdp")],
)
def test_each_way_of_training(runs: Runs, name: str, way: str) -> None:
    """Several updates, a loss with weights, tied weights, a stream, a teacher: trained, saved, resumed to the bit."""
    processes, more = WAYS[way]
    if way == "fsdp" and name in BLOCKS:
        more = (*more, "--prepare.fsdp.blocks", BLOCKS[name])
    line = merged(*OFTEN, *EXAMPLES[name].short, *teacher(runs, name, "--progress.epoch", "1"), *more)
    whole = trained(runs, f"{name}/config", *line, name="whole", processes=processes)
    cut(runs, name, STOPPED, signal.SIGTERM, *line, processes=processes)
    resumed = trained(runs, f"{name}/config", *line, "--resume", "auto", name="cut", processes=processes)
    assert differing(whole, resumed) == []


def test_every_example_is_tested_and_described() -> None:
    """A folder, a row in README.md, a row here."""
    folders = {path.parent.name for path in (PROJECT / "examples").glob("*/config.yaml")}
    table = (PROJECT / "examples" / "README.md").read_text(encoding="utf-8")
    assert folders == EXAMPLES.keys() | NEED_MORE
    assert folders == {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
