"""python -m tools.same: two runs, commits or configs, compared to the last bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.base.errors import UserError
from tests.conftest import ENVIRONMENT, PROJECT, SMALL, Runs, copy_of_project, metrics, run
from tests.resume import cut, words
from tools.record.run import distance, first_difference, read, train
from tools.same import __main__ as tool
from tools.same import sides

# Each edit of the tests' model and loss: what it replaces, what is found, and what that means.
EDITS = {
    "another activation": ("nn.ReLU(inplace=True)", "nn.GELU()", "the output of features.0.2: ", "its computation"),
    "another dropout": ("nn.Dropout(dropout)", "nn.Dropout(dropout / 2)", "the output of head.1: ", "its computation"),
    "another loss": ("return self.function(", "return 1.01 * self.function(", "the output of loss[", "its computation"),
    "half a gradient": (
        "return self.head(self.features(image))",
        "x = self.features(image)\n        return self.head(0.5 * x + 0.5 * x.detach())",
        "the gradient of the output of features.4: ",
        "the backward pass changed",
    ),
}
CONFIGS = {
    ("optim.lr", "0.002"): ("weight features.0.0.weight: ", "the update changed"),
    ("loader.order.type", "sequential"): ("input model[0]: ", "the data, their order"),
    ("batch_size", "16"): ("input model[0]: float32 (64, 1, 8, 8) in A and float32 (16, 1, 8, 8) in B", "the data"),
    ("dist.random_seed", "7"): ("weight features.0.0.weight: ", "the initialisation"),
}


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same cut inside its second epoch and resumed, one of another seed, and a shorter one."""
    runs = Runs(tmp_path_factory.mktemp("experiments"))
    runs.train(*words("ema"), name="uncut")
    cut(runs, "ema", 8)
    runs.train(*words("ema", "--resume", "auto"), name="cut")
    runs.train(*words("ema", "--dist.random_seed", "7"), name="seed")
    runs.train(*words("ema", "--progress.epoch", "1"), name="short")
    return runs.root


def test_a_resumed_run_is_the_same(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of docs/resume.md: what differs between any two runs (speeds, starts) is left out."""
    assert tool.main([str(experiments / "uncut"), str(experiments / "cut")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("same: 15 rows up to step 10, ") and out.endswith("of the checkpoints of step 10\n")


def test_another_seed_is_not(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first row that differs, and by how much; then the entries of the checkpoints."""
    assert tool.main([str(experiments / "uncut"), str(experiments / "seed")]) == 1
    out = capsys.readouterr().out
    assert "15 of 15 rows differ, first the train row of step 1:\n  " in out
    assert "(difference " in out and "  model." in out and "numbers\n  and " in out


def test_runs_of_other_lengths(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared is what both have: the rows to the end of the shorter one, and a checkpoint of one step."""
    assert tool.main([str(experiments / "short"), str(experiments / "uncut")]) == 0
    out = capsys.readouterr().out
    assert "up to step 5 (where A ends; the other goes to 10), no checkpoints, since the runs have none of" in out


def test_nothing_to_compare(experiments: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*metrics.jsonl; name two folders of runs"):
        tool.main([str(experiments), str(experiments / "uncut")])
    with pytest.raises(UserError, match="two runs are compared as they are"):
        tool.main([str(experiments / "uncut"), str(experiments / "cut"), "--optim.lr", "1"])


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_what_a_and_b_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits and configs; what is neither, or both, and words without a meaning, are refused with a reason."""
    monkeypatch.setattr(sides, "PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"HEAD is neither .*, and .* is in no git repository"):
        tool.main(["HEAD", "."])
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    git(tmp_path, "branch", "mine")
    for file in ("mine", "a.yaml"):
        (tmp_path / file).write_text("model: {}\n")
    assert sides.Side.parse("a.yaml").path == tmp_path / "a.yaml"
    assert str(sides.Side.parse("HEAD")).endswith(" first)")
    for given, message in [
        (["HEAD", "HEAD~7"], "HEAD~7 is neither the folder of a run, nor a config file, nor a commit$"),
        (["mine", "."], "mine is a path and a commit; write ./mine for the path, [0-9a-f]{12} for the commit"),
        (["a.yaml", "HEAD"], "A and B must be of one kind"),
        (["HEAD", "."], "two commits need --config FILE"),
        (["a.yaml", "a.yaml", "--config", "a.yaml"], "--config is for two commits"),
        (["a.yaml", "a.yaml", "--name", "x"], "--name cannot be given"),
        (["HEAD", "HEAD", "--config", "b.yaml"], r"--config b.yaml: HEAD \(.*\) has no such file"),
    ]:
        with pytest.raises(UserError, match=message):
            tool.main(given)


def test_records(tmp_path: Path) -> None:
    """Of a step that was repeated, the last rows count; a line that was cut off does not; order is that of events."""

    def write(name: str, *rows: tuple[int, str, str, list[float]], end: str = "") -> Path:
        (tmp_path / name).mkdir()
        lines = [
            {"step": step, "kind": kind, "name": key, "type": "float32 (2,)", "digest": str(sketch), "norm": 5.0}
            | {"sketch": sketch}
            for step, kind, key, sketch in rows
        ]
        (tmp_path / name / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
        return tmp_path / name

    first, repeated = (1, "weight", "w", [3.0, 4.0]), (2, "weight", "w", [0.0, 1.0])
    a = read(write("a", first, repeated))
    b = read(write("b", first, (2, "weight", "w", [9.0, 9.0]), repeated, end='\n{"step": 3, "ki'))
    assert b.steps == 2 and first_difference(a, b) is None
    c = read(write("c", (1, "output", "new", [0.0]), (1, "weight", "w", [3.0, 4.5]), repeated))
    found = first_difference(a, c)
    assert found is not None and (found.step, found.name, round(found.distance, 9)) == (1, "w", 0.1)
    assert first_difference(a, c, tolerance=0.2) is None
    found = first_difference(a, read(write("d", first, (1, "weight", "v", [1.0]), repeated)))
    assert found is not None and str(found) == "weight v: only in B"
    assert distance(None, None) == float("inf")
    with pytest.raises(UserError, match="has no record"):
        read(tmp_path)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in a git repository, with data that git ignores."""
    project = copy_of_project(tmp_path_factory.mktemp("repository") / "project")
    (project / "data").unlink()
    (project / "data" / "mine").mkdir(parents=True)
    shutil.copy(project / "tests" / "digits.npz", project / "data" / "mine")
    (project / ".gitignore").write_text("data/\n__pycache__/\n")
    samples = project / "tests" / "samples.py"
    text = samples.read_text()
    reads = 'np.load(Path(__file__).with_name("digits.npz"))'
    assert text.count(reads) == 1
    samples.write_text(text.replace(reads, 'np.load(data_dir / "mine" / "digits.npz")'))
    git(project, "init")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")
    return project


def compared(project: Path, *given: str, without: str = "") -> "subprocess.CompletedProcess[str]":
    """The tool in this project, with small settings except `without`."""
    small = [word for pair in SMALL.items() if pair[0] not in ("--config", without) for word in pair]
    place = {**ENVIRONMENT, "PYTHONPATH": str(project), "TMPDIR": str(project.parent)}
    command = [sys.executable, "-m", "tools.same", *given, "--steps", "2", *small]
    done = run(command, cwd=project, env=place, timeout=600)
    assert not list(project.parent.glob("same-*")), "the temporary folder is left"
    assert not (project / "experiments").exists()
    return done


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found(repository: Path, edit: str) -> None:
    """An uncommitted edit against HEAD: the first module, or the first gradient, that differs."""
    old, new, place, meaning = EDITS[edit]
    samples = repository / "tests" / "samples.py"
    text = samples.read_text()
    assert old in text
    samples.write_text(text.replace(old, new))
    try:
        done = compared(repository, "HEAD", ".", "--config", "tests/base.yaml")
    finally:
        samples.write_text(text)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"different: first in step 1: {place}"), done.stdout
    assert meaning in done.stdout


@pytest.mark.slow
def test_an_equal_refactoring_is_the_same(repository: Path) -> None:
    """A commit against the one before it; what was compared is said, and before that, what is done."""
    samples = repository / "tests" / "samples.py"
    text = samples.read_text()
    samples.write_text(text.replace("self.head(self.features(image))", "self.head(features := self.features(image))"))
    git(repository, "commit", "-am", "a name")
    try:
        done = compared(repository, "HEAD~1", "HEAD", "--config", "tests/base.yaml", "--json")
    finally:
        git(repository, "reset", "--hard", "HEAD~1")
    found = json.loads(done.stdout)
    assert (done.returncode, found["same"], found["difference"]) == (0, True, None), done.stderr
    assert found["compared"].startswith("2 steps, ") and "of the checkpoints of step 2" in found["compared"]
    assert "A: HEAD~1 (" in done.stderr and "and once more if they differ\nA took " in done.stderr


@pytest.mark.slow
def test_a_run_that_differs_from_itself(repository: Path) -> None:
    """Nothing can be compared then: exit code 2, and the first difference of A from A."""
    samples = repository / "tests" / "samples.py"
    text = samples.read_text()
    drawn = "np.random.default_rng().normal() * 1e-3 + self.images[index]"
    samples.write_text(text.replace("image = self.images[index]", f"image = ({drawn}).float()"))
    try:
        done = compared(repository, ".", ".", "--config", "tests/base.yaml")
    finally:
        samples.write_text(text)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(
        "cannot compare: A differs from itself, trained twice; first in step 1: input model[0]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("setting", CONFIGS, ids=" ".join)
def test_two_configs(tmp_path: Path, repository: Path, setting: tuple[str, str]) -> None:
    """The second config has one other value; batches of other sizes have tensors of other shapes."""
    key, value = setting
    nested = value
    for name in reversed(key.split(".")):
        nested = f"{{{name}: {nested}}}"
    first, second = repository / "tests" / "base.yaml", tmp_path / "second.yaml"
    second.write_text(f"$BASE: {first}\n{nested[1:-1]}\n")
    done = compared(repository, str(first), str(second), without=f"--{key}")
    place, meaning = CONFIGS[setting]
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("different: first in "), done.stdout
    assert place in done.stdout and meaning in done.stdout, done.stdout


@pytest.mark.slow
def test_recording_changes_nothing(runs: Runs) -> None:
    """A recorded run measures what another does; one killed and resumed has the same record of each rank."""
    given = words("plain", "--dist.processes", "2", "--batch_size", "16", "--gpu_ids=-1")
    small = [f"{name}={value}" for name, value in SMALL.items() if name not in given]
    settings = [*small, *given]
    whole, killed = (train(PROJECT, settings, runs.root / "whole"), runs.root / "killed")
    train(PROJECT, settings, killed, signal="SIGKILL@7")
    assert (first := read(killed)).steps == 7 and len(first.ranks) == 2
    resumed = train(PROJECT, [*settings, "--resume", "auto"], killed)
    assert resumed.steps == whole.steps == 10
    assert first_difference(whole, resumed) is None
    plain = run([sys.executable, "train.py", *settings, f"--dir.runs_dir={runs.root}", "--name=plain"], timeout=600)
    assert plain.returncode == 0, plain.stderr
    values = [[row["values"] for row in metrics(folder, "train")] for folder in (whole.run, runs.root / "plain")]
    assert values[0] == values[1]
