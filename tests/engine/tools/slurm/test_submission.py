"""What a Slurm job is made of: the run's folder, a copy of the code, frozen configurations."""

from collections.abc import Callable
from pathlib import Path

import pytest

from common.base.errors import UserError
from common.run.paths import RunPaths
from tests.conftest import CONFIG, Runs
from tests.tools.slurm.test_submission import git
from tools.slurm import __main__ as submit
from tools.slurm import snapshot


@pytest.fixture
def prepared(tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Path, str]]:
    """prepared("--gpus", "2", words=[...]): tools.slurm for a small run below `tmp_path`; the job's folder, GPUs."""

    def call(*options: str, words: list[str] | None = None) -> tuple[Path, str]:
        assert submit.main([*options, "--", *Runs(tmp_path).words(*(words or []))]) == 0
        run, job, gpus = capsys.readouterr().out.splitlines()
        assert run == str(tmp_path / "run")
        return Path(job), gpus

    return call


def test_processes_are_started_by_srun(prepared: Callable[..., tuple[Path, str]]) -> None:
    """Refused, with what would be right."""
    with pytest.raises(UserError, match=r"srun starts the processes; use --slurm.tasks 2"):
        prepared("--dry-run", words=["--dist.processes", "2"])


def test_processes_in_a_file(prepared: Callable[..., tuple[Path, str]], tmp_path: Path) -> None:
    """Not dropped without a word; what is typed overrides them."""
    file = tmp_path / "two.yaml"
    file.write_text(f"$BASE: {CONFIG}\ndist: {{processes: 2}}\n")
    with pytest.raises(UserError, match=r"srun starts the processes; use --slurm.tasks 2, and --dist.processes null"):
        prepared("--dry-run", words=["--config", str(file)])
    prepared("--dry-run", words=["--config", str(file), "--dist.processes", "null"])


def test_an_array_in_the_folder_of_a_run(prepared: Callable[..., tuple[Path, str]], tmp_path: Path) -> None:
    """The next run of that name would move the tasks away."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"attempts": []}')
    with pytest.raises(UserError, match="is the folder of a run; give the array another --name"):
        prepared("--array", "0-1")


def test_the_lock_of_a_job_that_was_killed(prepared: Callable[..., tuple[Path, str]], tmp_path: Path) -> None:
    """The file is left, but nothing holds it."""
    lock = tmp_path / "run" / "run.lock"
    lock.parent.mkdir()
    lock.write_text("process 1 on node17")
    prepared(words=["--resume", "auto"])
    assert not lock.exists()


@pytest.mark.parametrize("text", ["", "a", "4-2", "1-", "1,,2", "0-4%", "-1", "0-4:0"])
def test_a_list_of_tasks_that_is_none(text: str) -> None:
    """Refused with the forms that there are."""
    with pytest.raises(UserError, match=r"--slurm.array: .*0-99%4"):
        submit.array_tasks(text)


def test_the_number_of_a_task_without_an_array() -> None:
    with pytest.raises(UserError, match=r"%a stands for the number of a task: it needs --slurm.array"):
        submit.main(["--dry-run", "--", "--config", "configs/default.yaml", "--name", "x%a"])


def test_code_that_git_ignores(tmp_path: Path) -> None:
    """A package is needed as it lies, with what is compiled in it; not so an environment."""
    packages = {"custom/__init__.py", "custom/kernels/build/a.so", "dist/__init__.py", "dist/part.py"}
    others = ["custom/__pycache__/a.pyc", "other.so", "outputs/big.bin", ".venv/pyvenv.cfg", ".venv/a.py"]
    for name in ("train.py", *packages, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("*.so\ndist/\n.venv\noutputs\n__pycache__\n")
    git(tmp_path, "init", "-q")
    names = {path.as_posix() for path in snapshot.code_files(tmp_path, [])}
    assert names == {".gitignore", "train.py", *packages}


def test_too_much_for_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data beside the code would be copied with each job; the message names the largest files."""
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_MB", 1)
    (tmp_path / "train.py").touch()
    (tmp_path / "video.bin").write_bytes(bytes(2**21))
    with pytest.raises(UserError, match=r"video.bin \(2 MB\).*\.gitignore"):
        snapshot.snapshot(tmp_path, tmp_path / "experiments" / "code", [])
    assert not (tmp_path / "experiments").exists()


def test_too_much_code_leaves_nothing(
    prepared: Callable[..., tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_MB", 0)
    with pytest.raises(UserError, match="the limit is 0 MB"):
        prepared()
    assert not (tmp_path / ".jobs").exists()


def test_folders_in_a_config_keep_their_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that begin at the project's root, which is that of the copy in a job; the others begin where the
    command is given, and so does the job.
    """
    values = {
        "name": "x", "resume": "experiments/old/", "gpu_ids": -1, "dist": {"processes": 2},
        "dir": {"runs_dir": "runs", "data_dir": None, "eval_dir": "out"},
        "init_from": {"path": "./experiments/old/checkpoints/best.pt"},
    }  # fmt: skip
    monkeypatch.setattr(submit, "PROJECT", tmp_path)
    found = submit.freeze_config(values, RunPaths(tmp_path / "runs" / "x" / "task_3"), 0)
    assert found["dir"] == {
        "runs_dir": f"{tmp_path}/runs/x", "data_dir": f"{tmp_path}/data", "eval_dir": f"{tmp_path}/out"
    }  # fmt: skip
    assert (found["name"], found["dist"]) == ("task_3", {"processes": None, "launcher": "auto"})
    assert found["resume"] == values["resume"]
    assert found["init_from"] == {"path": f"{tmp_path}/experiments/old/checkpoints/best.pt"}
    own = {**values, "dir": {"runs_dir": "runs", "data_dir": None, "eval_dir": None, "cache_dir": "/scratch"}}
    assert submit.freeze_config(own, RunPaths(tmp_path / "x"), 0)["dir"]["cache_dir"] == "/scratch"


def test_a_new_run_from_the_weights_of_its_own_folder(
    prepared: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    """The folder would be moved away, with the weights in it, before the job begins."""
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    best.parent.mkdir(parents=True)
    best.touch()
    for options in ([], ["--dry-run"]):
        with pytest.raises(UserError, match=r"init_from.path: .*best.pt .*another --name"):
            prepared(*options, words=["--init_from.path", str(best)])
    assert best.exists() and not (tmp_path / ".jobs").exists()
