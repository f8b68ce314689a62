"""The moving average of the weights."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from common.base.errors import UserError
from common.checkpoint.weights import averaged_state_dict
from common.config import ConfigError
from common.progress import Position
from tests.conftest import Runs, load, metrics, same
from tests.parts.ema import test_ema as project
from tests.parts.ema.test_ema import AVERAGED, FIXED, Net, moved, values
from tests.ranks import several
from tests.resume import differing, final, words
from tools import checkpoint as tool

build = project.build  # the fixture


def test_half_precision_weights_are_averaged_in_32_bits(build) -> None:
    """bfloat16 cannot hold 1 + 0.001; the average must still move, and come back in the model's type."""
    model = Net()
    ema = build("{decay: 0.999, warmup: false}", model)
    with torch.no_grad():
        model.narrow.fill_(2.0)
    for _ in range(3):
        ema.update(model, Position())
    narrow = ema.state_dict()["shadow"]["narrow"]
    assert narrow.dtype == torch.float32
    assert narrow.tolist() == pytest.approx([2 - 0.999**3] * 2)
    assert averaged_state_dict(model.state_dict(), {"ema": ema.state_dict()})["narrow"].dtype == torch.bfloat16
    double = nn.Linear(1, 1).double()
    assert build(FIXED, double).state_dict()["shadow"]["weight"].dtype == torch.float64


def test_an_averaged_file_loads_as_the_average(build) -> None:
    """What evaluation saw can be written as plain weights, tied ones under both names."""
    model = Net()
    ema = build(FIXED, model)
    moved(model, 0)
    ema.update(model, Position())
    other = Net()
    other.load_state_dict(averaged_state_dict(model.state_dict(), {"ema": ema.state_dict()}))
    with ema.applied(model):
        assert same(values(model), values(other))


def test_off_is_an_object_with_the_same_methods(build) -> None:
    """Decay 0 does nothing anywhere, and leaves an average of an earlier run behind."""
    model = Net()
    ema = build("{}", model)
    own = values(model)
    assert not ema.is_active
    with ema.applied(model), ema.applied(model):
        assert same(values(model), own)
    assert ema.state_dict() == {}
    ema.load_state_dict(build(FIXED, model).state_dict())
    assert same(averaged_state_dict(model.state_dict(), {"ema": ema.state_dict()}), own)


def test_a_state_without_an_average_is_refused(build) -> None:
    """The checkpoint of a run without one; the message says what to do."""
    with pytest.raises(UserError, match=r"ema\.decay 0\.9.*no EMA weights.*set it to 0"):
        build(FIXED, Net()).load_state_dict({})


def test_a_buffer_that_its_module_replaces_is_followed(build) -> None:
    """`self.buffer = new` and `model.to(...)` make new tensors; the average reads where the model keeps them."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    ema = build(FIXED, model)
    model.mean = torch.ones(2)
    ema.update(model, Position())
    assert ema.state_dict()["shadow"]["mean"].tolist() == pytest.approx([0.1, 0.1])
    with ema.applied(model):
        assert model.mean.tolist() == pytest.approx([0.1, 0.1])
    assert model.mean.tolist() == [1.0, 1.0]


def test_the_average_does_not_share_memory_with_the_model(build) -> None:
    """An untouched average keeps the first weights while the model moves on."""
    model = Net()
    ema = build(FIXED, model)
    first = deepcopy(ema.state_dict()["shadow"])
    moved(model, 0)
    assert same(ema.state_dict()["shadow"], first)


def at_step(step: int) -> Position:
    return Position(step, *divmod(step * 10, 50), 50)


@pytest.mark.parametrize("start", ["8step", "1.6", "1.6epoch"])
def test_the_average_begins_at_its_start(build, start: str) -> None:
    """Until then the model's own weights count, in evaluation and in a checkpoint; then as from the start."""
    model = Net()
    ema = build(f"{{decay: 0.9, start: {start}}}", model)
    for n in range(8):
        moved(model, n)
        ema.update(model, at_step(n))
        own = values(model)
        with ema.applied(model):
            assert same(values(model), own)
        assert same(averaged_state_dict(own, {"ema": ema.state_dict()}), own)
    late = build("{decay: 0.9}", model)
    for n in range(8, 14):
        moved(model, n)
        ema.update(model, at_step(n))
        late.update(model, at_step(n))
        assert same(ema.state_dict()["shadow"], late.state_dict()["shadow"])
    assert ema.state_dict()["updates"] == 6


def test_the_start_may_be_taken_away(runs: Runs) -> None:
    """With allow_changes, the average of a run that still waits for its start begins at the resume."""
    folder = runs.train("--optim.ema", "{decay: 0.9, start: 100step}", "--progress.epoch", "1")
    words = ["--resume", "auto", "--allow_changes", "true"]
    runs.train("--optim.ema", "{decay: 0.9}", "--progress.max_steps", "6", *words)
    state = load(folder)
    assert state["ema"]["updates"] == 1
    assert not same(averaged_state_dict(state["model"], state), state["model"])


@pytest.mark.parametrize("text", ["{start: soon}", "{decay: 1.0}", "{decay: -0.1}", "{every: 0}", "{dcay: 0.9}"])
def test_mistakes_are_refused(build, text: str) -> None:
    """Ranges and names are checked when the configuration is read."""
    with pytest.raises(ConfigError, match=r"optim\.ema\.(start|decay|every|dcay)"):
        build(text, nn.Linear(1, 1))


def test_a_skipped_step_is_not_averaged(runs: Runs) -> None:
    loss = "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 5}}"
    folder = runs.train("--loss", loss, "--optim.bad_steps.action", "skip", *AVERAGED)
    assert len(metrics(folder, "skipped")) == 1
    assert load(folder)["ema"]["updates"] == load(folder)["position"]["step"] - 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_resume_exactly(runs: Runs, strategy: str) -> None:
    """Of whole weights, and of the part that each process holds."""

    def argv(name: str, *more: str) -> list[str]:
        given = ["--model", "{$REPLACE: true, type: tests.small.Plain}", "--dist.strategy", strategy]
        return runs.words(*words("plain", *given, *AVERAGED, "--batch_size", "16", *more), name=name)

    several(runs, 2, argv("uncut"))
    several(runs, 2, argv("cut"), at=6)
    several(runs, 2, argv("cut", "--resume", "auto"))
    assert differing(final(runs.root / "uncut"), final(runs.root / "cut")) == []


def test_weights_are_written_as_averages(runs: Runs, tmp_path: Path) -> None:
    folder = runs.train("--optim.lr", "0.05", "--optim.ema.decay", "0.9")
    state = load(folder)
    assert tool.main([str(folder / "checkpoints" / "latest.pt"), "--weights", str(tmp_path / "w.pt")]) == 0
    written = torch.load(tmp_path / "w.pt", weights_only=True)
    assert same(written, averaged_state_dict(state["model"], state))
    assert not torch.equal(written["head.2.weight"], state["model"]["head.2.weight"])


def test_the_exchange_of_weights_is_no_change_of_the_model(runs: Runs) -> None:
    """An evaluation exchanges them for their averages; what a forward pass changes is looked for within that."""
    log = (runs.train("--optim.ema.decay", "0.9", "--progress.max_steps", "2") / "train.log").read_text()
    assert "the forward pass changes" not in log
