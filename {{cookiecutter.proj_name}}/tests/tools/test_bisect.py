"""python -m tools.bisect: what makes two runs differ.

The slow test trains a real project with real commits. In the others, a function stands for the runs.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import UserError
from tests.conftest import ENVIRONMENT, Runs, copy_of_project, run
from tools.bisect.__main__ import conclude
from tools.bisect.runs import Point, Recorded, Trial, Trials
from tools.runs.read import RunFiles

KEYS, STEPS = 12, 31  # 30 commits, and uncommitted changes
Value = Callable[[int], float | None]  # of the number of changes


def recorded(curve: dict[int, float], config: dict[str, Any] | None = None) -> Recorded:
    """A record of a run that validated at these steps."""
    rows = [{"event": "val", "step": step, "values": {"loss": value}} for step, value in curve.items()]
    start = {"seed": 1, "git": {"commit": None, "dirty": False, "untracked": []}}
    return Recorded(RunFiles(Path("run"), "run", records=rows), start, config or {})


class FakeTrials(Trials):
    """A function of the number of changes stands for a run. GOOD has 1.0, and 0.01 more with each seed."""

    def __init__(self, result: Value) -> None:
        good, bad = ({"model": {f"k{key}": value for key in range(KEYS)}} for value in (0, 1))
        records = recorded({10: 1.0}, config=good), recorded({10: 2.0}, config=bad)
        super().__init__(*records, "val.loss", 10, Path())
        self.result, self.points = result, [Point("c", f"commit {number} 'Edit'") for number in range(STEPS + 1)]

    def train(self, trial: Trial) -> tuple[float | None, str]:
        value = self.result(trial.count)
        return (None, "crashed") if value is None else (value + 0.01 * trial.seed, "")


def search(result: Value) -> tuple[int, str]:
    """The exit code and the conclusion."""
    return conclude(FakeTrials(result), 4)


def has(number: int) -> Value:
    """A function that stands for runs: those with this change, from 0, are bad."""
    return lambda count: 2.0 if count > number else 1.0


@pytest.mark.parametrize("number", range(KEYS + STEPS))
def test_a_change_among_twelve_settings_and_thirty_commits_in_at_most_eight_runs(number: int) -> None:
    """It is named, with the values that prove it."""
    code, text = search(has(number))
    name = f"commit {number + 1} 'Edit'" if number < STEPS else f"model.k{number - STEPS} 0 -> 1"
    proof = f"{name} makes the difference: val.loss is 2.00000 with it, 1.00000 with only the changes before it"
    found = re.fullmatch(rf"{re.escape(proof)}\n(\d) runs; GOOD has 1.01500 \+- 0.01291 over 4 seeds", text)
    assert found and (code, int(found[1]) <= 8) == (0, True)


def test_code_that_does_not_run_is_skipped() -> None:
    """As by `git bisect skip`: around the cause, the runs cannot tell which it is, and say so."""
    assert search(lambda count: None if 5 < count < 9 else has(20)(count))[1].startswith("commit 21 'Edit' makes")
    text = search(lambda count: None if count == 20 else has(20)(count))[1]
    assert text.startswith("one of these, which no run can tell apart (commit 20 'Edit'; commit 21 'Edit'), makes the")
    with pytest.raises(UserError, match="GOOD with each seed, and BAD, must give a value here"):
        search(lambda count: None)


def test_what_is_no_cause() -> None:
    """What lies within the noise over seeds."""
    code, text = search(lambda count: 1.05 if count > STEPS else 1.0)
    assert code == 1
    assert text.startswith("no setting and no commit: GOOD has 1.01500 +- 0.01291 over 4 seeds, BAD 1.05000; if the")


LOSS = "return self.function("


class Repository:
    """A project under git, with runs in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.runs, self.temporary = (
            copy_of_project(folder / "project"),
            folder / "runs",
            folder / "temporary",
        )
        self.environment = {**ENVIRONMENT, "PYTHONPATH": "", "TMPDIR": str(self.temporary)}
        self.temporary.mkdir()
        (self.root / ".gitignore").write_text("__pycache__/\ndata\n")
        self.call("git", "init", "-q")
        self.commit("Start")

    def call(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program in the project."""
        done = run(list(command), cwd=self.root, env=self.environment, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def commit(self, message: str, file: str = "", old: str = "", new: str = "") -> None:
        """Commit all changes, after replacing a text of a file."""
        if file:
            self.edit(file, old, new)
        self.call("git", "add", "-A")
        self.call("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", message)

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new))

    def train(self, name: str, *words: str) -> str:
        words = ("--config", str(self.root / "tests" / "base.yaml"), *words)
        self.call(sys.executable, "train.py", *Runs(self.runs).words(*words, name=name))
        return str(self.runs / name)

    def bisect(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Call the tool; it must leave the project and the temporary folder as they were."""
        before = self.call("git", "status", "--porcelain").stdout, (self.root / ".git" / "index").read_bytes()
        done = self.call(sys.executable, "-m", "tools.bisect", *words, code=code)
        assert (self.call("git", "status", "--porcelain").stdout, (self.root / ".git" / "index").read_bytes()) == before
        assert not list(self.temporary.glob("bisect-*"))
        return done


@pytest.mark.slow
def test_a_commit_of_a_real_repository(tmp_path: Path) -> None:
    """A change of the loss is found among settings, a commit that does not run, and uncommitted changes."""
    repository = Repository(tmp_path)
    good = repository.train("good")
    repository.commit("Half of a rewrite", "tests/samples.py", "class Digits:", "class Digit:")
    repository.commit("The other half", "tests/samples.py", "class Digit:", "class Digits:")
    repository.commit("Count twice", "tests/samples.py", LOSS, LOSS.replace("self", "2 * self"))
    repository.commit("Notes", "README.md", "# ", "## ")
    repository.commit("Wording", "common/step.py", '"""One optimizer', '"""An optimizer')
    repository.edit("common/step.py", '"""An optimizer', '"""A single optimizer')
    bad = repository.train("bad", "--optim.weight_decay", "0.001", "--model.dropout", "0.11")
    done = repository.bisect(good, bad, "--seeds", "2")
    assert "differ    2 settings, 5 commits and uncommitted changes\n" in done.stderr
    assert re.match(r"commit \w+ 'Count twice' makes the difference: val.loss is .*\n3 runs; ", done.stdout)
    assert re.search(r"\d  +none .* up to commit \w+ 'Half of a rewrite'; seed 42 ", done.stderr)
