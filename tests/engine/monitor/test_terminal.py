"""What a run looks like on a terminal and in its log, and how keys are answered."""

import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from common.base.text import number
from common.evaluation.loss import Losses
from common.progress import Position
from common.trainer import Trainer
from engine.monitor.pseudo_terminal import in_terminal
from tests.conftest import PROJECT, Runs, metrics
from custom.tasks.classification_task import ClassificationTask

MANY = """
$BASE: {base}
loss:
  CrossEntropyLoss: {{label_smoothing: 0.1}}
  flat: {{type: torch.nn.MSELoss, weight: 0.01, inputs: {{input: output.logits, target: output.logits}}}}
  small: {{type: torch.nn.L1Loss, weight: 0.01, inputs: {{input: output.logits, target: output.logits}}}}
metric:
  top3: {{type: Accuracy, k: 3}}
  ConfusionMatrix: {{per_class: true}}
best: {{metric: top3}}
optim:
  clip_gradients: 5.0
  groups: [{{match: features.0.*}}, {{match: features.1.*, lr_mult: 0.5}}, {{match: features.3.*, lr_mult: 0.1}}]
progress: {{train_metric: true}}
"""


@pytest.fixture
def short() -> Iterator[Runs]:
    """A place for runs whose path is short, as a person's is: a path is never broken."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Runs(Path(folder))


def command(runs: Runs, *words: str) -> list[str]:
    return [sys.executable, "train.py", *runs.words(*words)]


@pytest.mark.slow
def test_rows_of_numbers(short: Runs) -> None:
    """With three losses, four groups and a metric for each class."""
    (short.root / "many.yaml").write_text(MANY.format(base=PROJECT / "tests" / "base.yaml"))
    words = ["--progress.epoch_eval", "1", "--config", str(short.root / "many.yaml")]
    shown = in_terminal(command(short, *words), 100)
    assert shown.code == 0, shown.text
    trained = [line for line in shown.lines if re.search(r"INFO +epoch .* loss ", line)]
    assert len(trained) == 5 and not any("common.trainer" in line for line in shown.lines)
    assert any(re.match(r"epoch 2: .* \d+/10 \[", line) for line in shown.lines)
    log = (short.root / "run" / "train.log").read_text()
    assert len(re.findall(r"INFO +common.trainer:\d+ +epoch +\d/2 step .* mem \d+ MB$", log, re.MULTILINE)) == 5
    assert shown.text.count("| best so far") == log.count("| best so far") > 0
    assert log.count("precision_9") == 5 + 2 + 2 + 2


class WithNumber(ClassificationTask):
    """Logs a number of its own, as the README shows."""

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        losses = super().losses(output, batch)
        losses["logit_norm"] = output["logits"].norm(dim=1).mean()
        return losses


@pytest.mark.slow
def test_an_added_number_keeps_the_log_readable(short: Runs) -> None:
    """One row for each log line, no loss twice, metrics before further losses, one rounding; each epoch has a loss."""
    words = ["--task.type", f"{__name__}.WithNumber", "--progress.log_every", "50"]
    shown = in_terminal(command(short, *words), 120)
    assert shown.code == 0, shown.text
    trained = [line for line in shown.lines if re.search(r"INFO +epoch .* loss ", line)]
    assert len(trained) == 2 and all("  logit_norm " in line for line in trained)  # 5 steps an epoch, not 50
    assert "CrossEntropyLoss" not in "".join(line for line in shown.lines if " | " in line)
    assert not any("saved latest.pt (" in line for line in shown.lines)
    folder = short.root / "run"
    accuracy = number(metrics(folder, "val")[-1]["values"]["Accuracy"])
    (last,) = (line for line in shown.lines if line.startswith("  last "))
    assert f"Accuracy {accuracy}" in last
    assert any(re.search(rf" val    2/2 step 10/10 \\| loss .* Accuracy {accuracy}", line) for line in shown.lines)
    assert len(metrics(folder, "train")) == 2


@pytest.mark.slow
def test_without_colour_and_at_debug(short: Runs) -> None:
    """NO_COLOR is respected."""
    words = command(short, "--monitor.log_level", "DEBUG", "--progress.epoch", "1")
    shown = in_terminal(words, 120, variables={"NO_COLOR": "1", "TQDM_DISABLE": "1"})
    assert shown.code == 0 and "\x1b" not in shown.raw
    assert len(re.findall(r"^\S+ INFO +epoch 1/1 step", shown.text, re.MULTILINE)) == 3


def stop(trainer: Trainer) -> None:
    """A plug-in: a signal arrives after the third step."""
    stepped = trainer.monitor.step_done

    def tell(position: Position, samples: int) -> None:
        stepped(position, samples)
        if position.step == 3:
            signal.raise_signal(signal.SIGTERM)

    trainer.monitor.step_done = tell  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ([], ["best", "last"]),
        (["--early_stop.patience", "1", "--best.min_delta", "99"], ["best", "last"]),
        (["--plugins", f"[{__name__}:stop]"], ["resume"]),
        (["--dataset.val", "null"], []),
    ],
    ids=["finished", "early stop", "stopped", "no validation"],
)
def test_a_summary_closes_a_run(runs: Runs, words: list[str], rows: list[str]) -> None:
    """What was reached, and how to resume a stopped run, by a command that names a folder that exists."""
    ended = runs.fail(*words, name="my läuf")  # printed so that it can be pasted
    folder = runs.root / "my läuf"
    log = (folder / "train.log").read_text().splitlines()
    at = next(number for number, line in enumerate(log) if "trained for 0:00:" in line)
    summary = dict(line.split(maxsplit=1) for line in log[at + 1 :])
    assert list(summary) == rows
    assert "resume" not in summary or Path(shlex.split(summary["resume"])[-1]) == folder, log
    if "best" in rows:
        assert re.match(r"loss \S+  Accuracy \S+ \(best.pt: step \d+\)$", summary["best"])
    assert ended == (143 if "resume" in rows else 0)


@pytest.mark.slow
def test_the_command_of_a_summary_works(short: Runs) -> None:
    """As printed: the stopped run is resumed."""
    shown = in_terminal(command(short, "--plugins", f"[{__name__}:stop]"), 80)
    assert shown.code == 143 and "SIGTERM: stopping after this step, then saving" in shown.text
    python = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    text = re.search(r"^  resume +(python .*)$", shown.text, re.MULTILINE)
    assert text, shown.text
    done = in_terminal(["sh", "-c", f"{text[1]} --plugins '[]'"], 80, variables=python)
    assert done.code == 0 and "trained for 0:00:" in done.text, done.text


def breaks(trainer: Trainer) -> None:
    """A plug-in: the sixth step, after a checkpoint, fails."""

    def fail() -> None:
        if trainer.monitor.step == 6:
            raise RuntimeError("broken")

    trainer.monitor.after_step.append(fail)


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_failure_fits_the_terminal_and_says_how_to_continue(short: Runs, processes: str) -> None:
    """Its level is a word; the command that resumes the run can be pasted, whatever the run is called."""
    given = ["--plugins", f"[{__name__}:breaks]", "--dist.processes", processes, "--checkpoint.background", "false"]
    words = short.words(*given, name="my run")
    shown = in_terminal([sys.executable, "train.py", *words], 90)
    assert shown.code == 1, shown.text
    assert not [line for line in shown.lines if line.count("=") > 20 and len(line) > 90]
    assert re.search(r"^\S+ ERROR ", shown.text, re.MULTILINE)
    (line,) = (line for line in shown.lines if line.startswith("to resume:  "))
    again = shlex.split(line.removeprefix("to resume:  "))
    assert again == ["python", "train.py", "--resume", str(short.root / "my run")]
    assert in_terminal([sys.executable, *again[1:], "--plugins", "[]"], 90).code == 0
