"""python -m tools.bisect: what makes two runs differ.

The slow tests train a real project with real commits. In the others, a function of the trial stands for its run.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.base.errors import UserError
from common.checkpoint.fingerprint import Change
from tests.conftest import ENVIRONMENT, Runs, copy_of_project, run
from tools.bisect.__main__ import Search, conclude, main
from tools.bisect.code import Point
from tools.bisect.runs import (
    Recorded,
    Result,
    Trials,
    default_metric,
    differing_environment,
    differing_settings,
    first_clear_step,
    mixed,
)
from tools.bisect.search import Trial
from tools.runs.read import RunFiles

KEYS, STEPS = 12, 31  # 30 commits, and uncommitted changes


def recorded(curve: dict[int, float], seed: int = 1, config: dict[str, Any] | None = None, **start: Any) -> Recorded:
    """A record of a run that validated at these steps."""
    rows = [{"event": "val", "step": step, "values": {"loss": value}} for step, value in curve.items()]
    return Recorded(RunFiles(Path("run"), "run", records=rows), {"seed": seed, **start}, config or {})


def search(value: Callable[[Trial], float | None], keys: int = KEYS, steps: int = STEPS, **seeds: int) -> Search:
    """A search in which a function of the trial stands for runs. GOOD has 1.0, and 0.01 more with each seed."""
    settings = {f"k{number}": [Change(f"k{number}", 0, 1)] for number in range(keys)}
    points = [Point("c", f"commit {number} 'Edit'") for number in range(steps + 1)]

    def result(trial: Trial) -> Result:
        at = value(trial)
        noise = 0.0 if trial.seed is None else 0.01 * (trial.seed - 1)
        return Result(None if at is None else at + noise, "" if at is not None else "crashed", 1.0)

    trials = SimpleNamespace(
        settings=settings, points=points, metric="val.loss", step=10, result=result,
        good=recorded({10: 1.0}, seed=1), bad=recorded({10: 2.0}, seed=seeds.get("bad", 1)),
        copies=SimpleNamespace(changed=lambda step: [f"{step + 1}.py"]),
    )  # fmt: skip
    return Search(cast(Trials, trials), 4)


def if_set(key: str) -> Callable[[Trial], float]:
    """A function that stands for runs: those with BAD's value of this setting are bad."""
    return lambda trial: 2.0 if key in trial.settings else 1.0


def if_changed(step: int) -> Callable[[Trial], float]:
    """A function that stands for runs: those with this step of the code are bad."""
    return lambda trial: 2.0 if has(trial, step) else 1.0


def has(trial: Trial, step: int) -> bool:
    """Whether the code of a trial has this step."""
    return trial.point > step and step not in trial.without


def test_twelve_settings_and_thirty_commits_in_at_most_eight_runs() -> None:
    """Whichever it is, it is named, and proven: GOOD with it is bad, and BAD without it is good."""
    for number in range(KEYS):
        found = search(if_set(f"k{number}"))
        code, _, text = conclude(found, 10)
        assert (code, found.runs <= 8) == (0, True)
        assert text.startswith(
            f"k{number} 0 -> 1 makes the difference: val.loss is 2.00000 with it; BAD without it has 1.0"
        )
        assert f"\n{found.runs} runs; GOOD has 1.01500 +- 0.01291 over seeds" in text
    for step in range(STEPS):
        found = search(if_changed(step))
        code, _, text = conclude(found, 10)
        assert (code, found.runs <= 8) == (0, True)
        assert text.startswith(
            f"commit {step + 1} 'Edit' ({step + 1}.py) makes the difference: val.loss is 2.00000 with it"
        )
        assert "1.00000 just before it; BAD without it has 1.00000" in text


@pytest.mark.parametrize(
    ("bad", "named", "most"),
    [
        (lambda trial: {"k3", "k9"} <= trial.settings, ["k3 0 -> 1 and k9 0 -> 1 make the"], 12),
        (
            lambda trial: "k3" in trial.settings and has(trial, 11),
            ["k3 0 -> 1 and commit 12 'Edit' (12.py) make the"],
            13,
        ),
        (
            lambda trial: "k3" in trial.settings or has(trial, 11),
            ["commit 12 'Edit' (12.py) makes", "k3 0 -> 1 makes"],
            14,
        ),
        (lambda trial: bool({"k3", "k7"} & trial.settings), ["k3 0 -> 1 makes the", "k7 0 -> 1 makes the"], 13),
    ],
    ids=["two settings", "a setting and a commit", "a setting or a commit", "either of two settings"],
)
def test_more_than_one_change(bad: Callable[[Trial], bool], named: list[str], most: int) -> None:
    """What is needed together is one cause; what is enough by itself is a cause of its own."""
    found = search(lambda trial: 2.0 if bad(trial) else 1.0)
    code, causes, text = conclude(found, 10)
    assert (code, len(causes)) == (0, len(named))
    assert all(line.startswith(name) for line, name in zip(text.splitlines(), named, strict=False))
    assert "this is not all" not in text and found.runs <= most


def test_code_that_does_not_run_is_skipped() -> None:
    """As by `git bisect skip`: around the cause, the runs cannot tell which it is, and say so."""
    found = search(lambda trial: None if 5 < trial.point < 9 else 2.0 if has(trial, 20) else 1.0, keys=0)
    assert conclude(found, 10)[2].startswith("commit 21 'Edit' (21.py) makes the difference")
    found = search(lambda trial: None if trial.point in (20, 21) else 2.0 if has(trial, 20) else 1.0, keys=0)
    text = conclude(found, 10)[2]
    assert text.startswith("one of these, which no run tells apart: commit 20 'Edit' (20.py); commit 21 'Edit' (21.py)")
    with pytest.raises(UserError, match="GOOD, seed 1 gives no value: crashed"):
        search(lambda trial: None)


def test_a_loss_that_is_not_finite_is_bad_where_that_of_bad_is() -> None:
    found = search(lambda trial: float("nan") if "k5" in trial.settings else 1.0)
    assert conclude(found, 10)[2].startswith("k5 0 -> 1 makes the difference: val.loss is nan with it")


def test_noise_is_no_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """A difference within four standard deviations over seeds is not searched for; records may tell of a later one."""
    found = search(lambda trial: 1.05 if "k3" in trial.settings else 1.0)
    object.__setattr__(found.trials.bad, "files", recorded({10: 1.05, 20: 3.0}).files)
    object.__setattr__(found.trials.good, "files", recorded({10: 1.0, 20: 1.0}).files)
    code, causes, text = conclude(found, 20)
    assert (code, causes, found.runs) == (1, [], 0)
    assert text == (
        "the difference is within the noise over seeds: GOOD has 1.01500 +- 0.01291 over seeds, BAD 1.05000; "
        "no cause to look for\nthe records differ by more at step 20: --steps 20"
    )


def test_what_is_neither_a_setting_nor_code() -> None:
    """The seed, if BAD is bad only with its own; packages, if the records are not repeated here; else it says so."""
    found = search(lambda trial: 2.0 if trial.seed == 50 else 1.0, bad=50)
    assert conclude(found, 10)[2].startswith("seed 50 makes the difference: BAD has 2.49000 with it")
    found = search(lambda trial: 1.0)
    assert conclude(found, 10)[::2] == (
        1,
        "no setting and no commit: the records have 1.00000 and 2.00000, but here GOOD has 1.01500 +- 0.01291 over "
        "seeds, BAD 1.00000; what remains: data, files unknown to git, chance on a GPU",
    )
    found.trials.good.start["packages"] = {"numpy": "1.26", "tqdm": "1"}
    found.trials.bad.start["packages"] = {"numpy": "2.0", "tqdm": "2", "scipy": "1.0"}
    code, _, text = conclude(found, 10)
    assert (code, text.partition("what remains: ")[2]) == (0, "packages.numpy 1.26 -> 2.0")
    assert differing_environment(found.trials.good, found.trials.good) == []


def test_where_the_curves_differ() -> None:
    """From the first step on after which they differ clearly to the end, and not where they cross or waver."""
    good = recorded({1: 3.0, 2: 2.5, 3: 2.0, 4: 1.5, 5: 1.0})
    assert first_clear_step(good, recorded({1: 3.1, 2: 2.4, 3: 2.4, 4: 2.2, 5: 2.0}), "val.loss") == (4, 5)
    assert first_clear_step(good, recorded({1: 3.0, 2: 2.5, 3: 2.01}), "val.loss") == (3, 3)
    assert default_metric(good, good) == "val.loss"
    with pytest.raises(UserError, match=r"both runs must have measured train.loss; GOOD has val.loss"):
        first_clear_step(good, good, "train.loss")
    assert default_metric(good, recorded({})) == "train.loss"


def test_settings_that_differ() -> None:
    """Arguments of another type go with it; what decides no training, and the seed, are left out."""
    good = recorded({}, config={"model": {"type": "A", "width": 4}, "optim": {"lr": 1}, "name": "a", "new": 1,
                                "dist": {"random_seed": 1}, "progress": {"max_steps": 8, "log_every": 1}})  # fmt: skip
    bad = recorded({}, config={"model": {"type": "B", "depth": 2}, "optim": {"lr": 2}, "name": "b",
                               "dist": {"random_seed": 7}, "progress": {"max_steps": 9, "log_every": 3}})  # fmt: skip
    settings = differing_settings(good, bad)
    assert {name: [each.key for each in keys] for name, keys in settings.items()} == {
        "model": ["model.type", "model.width", "model.depth"], "optim.lr": ["optim.lr"], "new": ["new"],
        "progress.max_steps": ["progress.max_steps"],
    }  # fmt: skip
    keys = [each.key for name in ("model", "new", "progress.max_steps") for each in settings[name]]
    assert mixed(good.config, bad.config, keys) == {
        "model": {"type": "B", "depth": 2}, "optim": {"lr": 1}, "name": "a", "dist": {"random_seed": 1},
        "progress": {"max_steps": 9, "log_every": 1},
    }  # fmt: skip


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no run.json or config; name the folder of a run"):
        main([str(tmp_path), str(tmp_path)])


# --- real runs of a real repository -------------------------------------------------------------------------------

LOSS = "return self.function("
INNOCENT = [
    "--optim.weight_decay", "0.001", "--model.dropout", "0.11", "--optim.no_decay", "auto", "--optim.clip_gradients",
    "50", "--optim.clip_type", "value", "--optim.lr_scheduler.patience", "11", "--optim.lr_scheduler.threshold",
    "0.001", "--optim.ema.warmup", "false", "--prepare.channels_last", "true", "--progress.max_steps", "1000",
    "--optim.lr_scheduler.min_factor", "0.1",
]  # fmt: skip


class Repository:
    """A project under git, with runs in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = copy_of_project(folder / "project")
        self.runs = Runs(folder / "experiments")
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        (self.root / ".gitignore").write_text("__pycache__/\ndata\n")
        self.git("init", "-q")
        self.commit("Start")

    def git(self, *words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *names, *words], cwd=self.root, check=True, capture_output=True, text=True).stdout

    def commit(self, message: str, file: str = "", old: str = "", new: str = "") -> None:
        """Commit all changes, after replacing a text of a file."""
        if file:
            self.edit(file, old, new)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new))

    def train(self, name: str, *words: str) -> Path:
        command = [sys.executable, "train.py", *self.runs.words(*words, name=name)]
        done = run(command, cwd=self.root, env=self.environment, timeout=600)
        assert done.returncode == 0, done.stderr
        return self.runs.root / name

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "PYTHONPATH": "", "TMPDIR": str(self.temporary)}

    def bisect(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Call the tool; it must leave the project and the temporary folder as they were."""
        before = self.git("status", "--porcelain"), (self.root / ".git" / "index").read_bytes()
        done = run([sys.executable, "-m", "tools.bisect", *words], cwd=self.root, env=self.environment, timeout=600)
        assert (self.git("status", "--porcelain"), (self.root / ".git" / "index").read_bytes()) == before
        assert not list(self.temporary.glob("bisect-*"))
        return done


@pytest.mark.slow
def test_a_commit_among_others_of_a_real_repository(tmp_path: Path) -> None:
    """A change of the loss is found among settings, commits that do not run, and uncommitted changes."""
    repository = Repository(tmp_path)
    good = repository.train("good")
    repository.commit("Wording", "common/step.py", '"""One optimizer', '"""An optimizer')
    repository.commit("Half of a rewrite", "tests/samples.py", "class Digits:", "class Digit:")
    repository.commit("The other half", "tests/samples.py", "class Digit:", "class Digits:")
    repository.commit("Count twice", "tests/samples.py", LOSS, LOSS.replace("self", "2 * self"))
    repository.commit("Notes", "README.md", "# ", "## ")
    repository.commit("More wording", "common/trainer.py", '"""The training', '"""A training')
    repository.edit("common/step.py", '"""An optimizer', '"""A single optimizer')
    bad = repository.train("bad", *INNOCENT[:6])
    done = repository.bisect(str(good), str(bad), "--seeds", "3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "'Count twice' (tests/samples.py) makes the difference: val.loss is" in result["conclusion"]
    assert "differ    3 settings, 5 commits, uncommitted changes: yes" in done.stderr
    assert result["runs"] <= 6 and len(result["found"]) == 1
    started = time.monotonic()
    again = repository.bisect(str(good), str(bad), "--seeds", "3", "--json")
    assert json.loads(again.stdout) == result and time.monotonic() - started < 30


@pytest.mark.slow
def test_a_setting_among_twelve_and_noise(tmp_path: Path) -> None:
    """The learning rate is found among twelve settings; the eleven others are within the noise."""
    repository = Repository(tmp_path)
    good, noise = repository.train("good"), repository.train("noise", *INNOCENT)
    bad = repository.train("bad", *INNOCENT, "--optim.lr", "0.03")
    done = repository.bisect(str(good), str(bad), "--seeds", "3")
    assert "differ    12 settings, 0 commits, uncommitted changes: no" in done.stderr
    assert (done.returncode, done.stdout.splitlines()[0].partition(":")[0]) == (
        0, "optim.lr 0.001 -> 0.03 makes the difference",
    ), done.stderr  # fmt: skip
    assert int(done.stdout.splitlines()[1].partition(" ")[0]) <= 8
    done = repository.bisect(str(good), str(noise), "--seeds", "3")
    assert (done.returncode, "within the noise over seeds" in done.stdout) == (1, True), done.stdout + done.stderr


def text(file: Path) -> str:
    """What is in a file, if it is still there."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """At once, while the process of a run is being started, and in the middle of a run."""
    repository = Repository(tmp_path)
    good, bad = repository.train("good"), repository.train("bad", "--optim.lr", "0.03")
    command = [sys.executable, "-m", "tools.bisect", str(good), str(bad)]
    for file in ("output.txt", "runs/run/run.json"):
        with subprocess.Popen(command, cwd=repository.root, env=repository.environment, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:  # fmt: skip
            try:
                while not list(repository.temporary.glob(f"bisect-*/{file}")) and process.poll() is None:
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=90)
            finally:
                process.kill()
        assert (process.returncode, "Traceback" in said) == (130, False), said
        assert not list(repository.temporary.glob("bisect-*"))
        assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(repository.temporary) in text(each)]
