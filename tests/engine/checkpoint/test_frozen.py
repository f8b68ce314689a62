"""`checkpoint.frozen: false`: what is not trained stays out of the files; a resume takes it from its source again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.base.parts import AVERAGE
from common.checkpoint import checksum as core
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.task import fixed
from engine.conftest import AVERAGED
from parts.frozen.tensors import checksum
from predict import Predictor
from tests.conftest import Runs, load, same
from tests.ranks import several
from tests.resume import cut, differing, final, words
from tests.small import Plain
from tools import checkpoint as tool
from custom.tasks.classification_task import ClassificationTask

HERE = "engine.checkpoint.test_frozen"
WIDTH = 30_000


class Adapted(nn.Module):
    """A large base of 1.9 million numbers with a table, and a small trained part, as with LoRA."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.down = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(65, 10)
        self.register_buffer("table", torch.randn(5_000))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.cat([image.flatten(1), self.down(self.base(image)) + self.table[0]], dim=1))


class Taught(ClassificationTask):
    """A teacher that follows, and one that stands still."""

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory) -> None:
        super().__init__(model, loss, metric)
        self.moving, self.still = fixed(Plain()), fixed(Plain())

    @torch.no_grad()
    def after_step(self) -> None:
        for tensor in self.moving.parameters():
            tensor.data.mul_(0.99)


MODEL = ["--model", f"{{type: {HERE}.Adapted}}", *AVERAGED]
PART = ["--prepare.freeze", "[base.*]", "--checkpoint.frozen"]


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def size(folder: Path) -> int:
    return (folder / "checkpoints" / "best.pt").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("resumed_with", ["false", "true"])
def test_a_small_file_resumes_exactly(runs: Runs, evaluated: Any, resumed_with: str) -> None:
    """The files hold what is trained; resume, evaluation and prediction give the same numbers as with all of it."""
    task = ["--task", f"{{type: {HERE}.Taught}}"]
    more = [*MODEL, *task, *PART]
    whole = runs.train(*words("plain", *more, "true"), name="whole")
    cut(runs, "plain", 8, *more, "false")
    part = runs.train(*words("plain", *more, resumed_with, "--resume", "auto"), name="cut")
    assert "this resume is bit-exact" in log(part)
    one, other = final(whole), final(part)
    if resumed_with == "true":
        return_to_whole = [name for name in differing(one, other) if not name.endswith((".frozen", ".fingerprint"))]
        assert return_to_whole == []
        return
    assert size(whole) > 4 * 64 * WIDTH  # the average holds nothing of it
    assert size(whole) < 1.2 * 4 * 70 * WIDTH
    assert size(part) < 0.1 * size(whole)
    state = load(part)
    assert set(state["frozen"]) == {f"base.1.{name}" for name in ("weight", "bias")} | {"table"} | {
        f"still.layers.{name}" for name in ("1.weight", "1.bias", "3.weight", "3.bias")
    }
    assert set(state[AVERAGE]["shadow"]) == {"down.weight", "head.weight", "head.bias", "table"}
    for name, value in {**state["model"], **state["task"]}.items():
        assert same(value, {**one["latest"]["model"], **one["latest"]["task"]}[name]), name
    assert one["measured"] == other["measured"]
    results = [evaluated(folder / "checkpoints" / "best.pt")["values"] for folder in (whole, part)]
    assert results[0] == results[1]
    weights = [Predictor(folder).trained.task.state_dict() for folder in (whole, part)]
    assert same(*weights)


def test_another_source_is_refused(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a resume: with the tensors that differ."""
    torch.manual_seed(1)
    for name in ("base", "other"):
        torch.save(Adapted(50).state_dict(), tmp_path / f"{name}.pt")
    model = ["--model.width", "50", *MODEL]
    words = [*model, *PART, "false", "--init_from.path"]
    folder = runs.train(*words, str(tmp_path / "base.pt"), "--progress.max_steps", "3")
    latest = folder / "checkpoints" / "latest.pt"
    message = (
        "leaves out 3 frozen tensors (checkpoint.frozen: false), and 3 of them are not what they were in training: "
        "table, base.1.weight, base.1.bias"
    )
    assert runs.fail(*words, str(tmp_path / "other.pt"), "--resume", "auto") == 2
    assert message in log(folder)
    capsys.readouterr()
    assert tool.main([str(latest)]) == 0
    assert "3 frozen tensors are not in it: table, base.1.weight, base.1.bias" in capsys.readouterr().out
    assert tool.main([str(latest), "--weights", str(tmp_path / "adapter.pt")]) == 0
    assert "without 3 frozen tensors" in capsys.readouterr().out
    assert set(torch.load(tmp_path / "adapter.pt", weights_only=True)) == {"down.weight", "head.weight", "head.bias"}


STAGES = "[{until: 3step, freeze: [base.*]}, {until: 7step, freeze: [down.*]}, {freeze: [base.*, head.*]}]"


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 6, 9])
def test_stages_that_freeze_other_parts(runs: Runs, at: int) -> None:
    """What any stage has trained is in the file, and so is its average; cut in each stage."""
    more = ["--model.width", "50", *MODEL, "--stages", STAGES, "--checkpoint.frozen"]
    whole = final(runs.train(*words("plain", *more, "true"), name="whole"))
    cut(runs, "plain", at, *more, "false")
    assert ("base.1.weight" in load(runs.root / "cut")["frozen"]) == (at == 3)
    part = final(runs.train(*words("plain", *more, "false", "--resume", "auto"), name="cut"))
    assert set(part["latest"]["frozen"]) == {"table"}
    assert set(part["latest"][AVERAGE]["shadow"]) == set(whole["latest"]["model"])
    for state in (whole["latest"], whole["best"], part["latest"], part["best"]):
        state["model"].pop("table", None)
        state.pop("frozen")
    assert differing(whole, part) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_processes(runs: Runs, strategy: str) -> None:
    """The same file as of one process, which can continue from it, and the other way round."""
    more = ["--model.width", "50", *MODEL, *PART, "false", "--progress.max_steps"]
    both = ["--dist.strategy", strategy, "--batch_size", "16"]
    several(runs, 2, runs.words(*more, "4", *both))
    one = runs.train(*more, "4", name="one")
    assert load(one)["frozen"] == load(runs.root / "run")["frozen"]
    assert set(load(one)["model"]) == set(load(runs.root / "run")["model"])
    runs.train(*more, "6", "--resume", "auto")
    several(runs, 2, runs.words(*more, "6", *both, "--resume", "auto", name="one"))


@pytest.mark.parametrize("checksum", [core.checksum, checksum], ids=["in the core", "on the device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_sees_each_number_and_its_place(dtype: torch.dtype, checksum: Callable[[Tensor], int]) -> None:
    values = torch.arange(200_001).remainder(97).to(dtype)
    changed = values.clone()
    changed[3] = changed[0]
    others = [values.roll(1), values[:-1], values.reshape(-1, 1), changed]
    assert len({checksum(each) for each in (values, *others)}) == 5


def test_a_checksum_is_the_same_in_any_precision_and_layout() -> None:
    """But not after two signs have changed."""
    values = torch.randn(4, 6, 5, 5)
    assert checksum(values) == checksum(values.double()) == checksum(values.to(memory_format=torch.channels_last))
    assert checksum(torch.ones(2)) != checksum(-torch.ones(2))
    assert checksum(torch.zeros(0)) != checksum(torch.zeros(1)) != checksum(torch.zeros(()))
