"""tools.same and tools.record: what A and B can be, what is found in configs, and what a record is."""

import json
import sys
from pathlib import Path

import pytest

from common.base.errors import UserError
from common.run.paths import RunPaths
from tests.conftest import PROJECT, SMALL, Runs, metrics, run
from tests.resume import words
from tests.tools.test_same import compared, git, repository
from tools.record.run import distance, first_difference, plugins_of, read, train
from tools.same import __main__ as tool
from tools.same import sides
from tools.same.folders import checkpoints

__all__ = ["repository"]
CONFIGS = {
    ("optim.lr", "0.002"): "weight features.0.0.weight: ",
    ("loader.order.type", "sequential"): "input model[0]: ",
    ("batch_size", "16"): "input model[0]: float32 (64, 1, 8, 8) in A and float32 (16, 1, 8, 8) in B",
    ("dist.random_seed", "7"): "weight features.0.0.weight: ",
}
FEW = [pytest.param(each, marks=[pytest.mark.full] * bool(at), id=" ".join(each)) for at, each in enumerate(CONFIGS)]


@pytest.mark.slow
def test_runs_of_other_lengths(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared is what both have: the rows to the end of the shorter one, and a checkpoint of one step."""
    short, long = (runs.train(*words("plain", "--progress.epoch", epochs), name=epochs) for epochs in "12")
    assert tool.main([str(short), str(long)]) == 0
    out = capsys.readouterr().out
    assert "up to step 5 of 10, no checkpoints, since the runs have none of" in out


def test_files_that_a_resume_set_aside_are_not_compared(runs: Runs) -> None:
    """Neither those of steps that were trained again, nor damaged ones, even if their first bytes can be read."""
    folder = runs.train("--progress.max_steps", "2")
    kept = RunPaths(folder).checkpoints / "latest.pt"
    for file in (kept.with_name("best.pt"), kept.with_name("step_00000002.pt")):
        file.unlink()
    assert checkpoints(folder) == {2: kept}
    for name in ("abandoned_latest.pt", "damaged_latest.pt", "damaged_step_00000002.pt"):
        kept.rename(kept.with_name(name))
        assert checkpoints(folder) == {}
        kept.with_name(name).rename(kept)


def test_the_latest_checkpoint_of_a_step_is_compared(runs: Runs) -> None:
    """A resume that only ran an evaluation that was owed replaces it, but no numbered one of the same step."""
    folder = RunPaths(runs.train("--progress.max_steps", "2")).checkpoints
    (folder / "step_00000002.pt").touch()
    assert checkpoints(folder.parent) == {2: folder / "latest.pt"}


def test_what_a_and_b_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits and configs; what is neither, or both, and words without a meaning, are refused with a reason."""
    monkeypatch.setattr(sides, "PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="HEAD is neither "):
        tool.main(["HEAD", "."])
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    (tmp_path / "a.yaml").write_text("model: {}\n")
    assert sides.Side.parse("a.yaml").path == tmp_path / "a.yaml"
    assert str(sides.Side.parse("HEAD")).endswith(" first)")
    for given, message in [
        (["HEAD", "HEAD~7"], "HEAD~7 is neither the folder of a run, nor a config file, nor a commit of "),
        (["a.yaml", "HEAD"], "A and B must be of one kind"),
        (["HEAD", "."], "two commits need --config FILE"),
        (["a.yaml", "a.yaml", "--config", "a.yaml"], "runs and configs are compared without it"),
        ([".", ".", "--config", "a.yaml", "--name", "x"], "--name .*\n *is given more than once"),
        ([str(tmp_path), str(tmp_path), "--optim.lr", "1"], "two runs are compared as they are, without --optim.lr"),
        ([str(tmp_path), str(tmp_path)], "metrics.jsonl has no measurements; name two folders of runs"),
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
    assert done.stdout.startswith("cannot be compared; compared: 2 steps, ")
    assert "\nA differs from itself: first in step 1: input model[0]: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("setting", FEW)
def test_two_configs(tmp_path: Path, repository: Path, setting: tuple[str, str]) -> None:
    """The second config has one other value; batches of other sizes have tensors of other shapes."""
    key, value = setting
    nested = value
    for name in reversed(key.split(".")):
        nested = f"{{{name}: {nested}}}"
    first, second = repository / "tests" / "base.yaml", tmp_path / "second.yaml"
    second.write_text(f"$BASE: {first}\n{nested[1:-1]}\n")
    done = compared(repository, str(first), str(second), without=f"--{key}")
    assert done.returncode == 1, done.stderr
    assert CONFIGS[setting] in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.full
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


def test_what_git_ignores_is_linked_wherever_the_copies_lie(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `build` in the project would not be; one around the copies says nothing."""
    monkeypatch.setattr(sides, "PROJECT", repository)
    head = sides.git("rev-parse", "HEAD", cwd=repository).strip()
    (tmp_path / "build").mkdir()
    copy = sides.Side("commit", "HEAD", commit=head).export(tmp_path / "build" / "A")
    assert (copy / "data").is_symlink()


def test_plugins_in_one_text(tmp_path: Path) -> None:
    """As the command line takes them."""
    assert plugins_of(tmp_path, {"--plugins": "a.one,b.two"}) == ["a.one", "b.two"]
