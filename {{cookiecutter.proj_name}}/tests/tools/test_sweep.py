"""tools.sweep: the runs of a sweep are planned, trained, resumed and compared."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.base.errors import UserError
from tests.conftest import ENVIRONMENT, PROJECT, SMALL, run
from tools.sweep import __main__ as sweep
from tools.sweep.runs import devices
from tools.sweep.space import grid, read_space, run_name

# A plugin: the run with this name fails while there is a file `spoil`; all are slow while there is a file `slow`.
PLUGIN = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def begin(trainer):
    if (HERE / "spoil").exists() and trainer.paths.name == "lr=1e-2_width=8":
        raise RuntimeError("this run is to fail")
    def wait(*_):
        if (HERE / "slow").exists():
            time.sleep(0.3)
    trainer.optimizer.register_step_post_hook(wait)
"""


def words(folder: Path, *more: str) -> list[str]:
    """Return a small sweep in `folder`, named tried."""
    settings = {**SMALL, "--dir.runs_dir": str(folder), "--name": "tried"}
    del settings["--model.width"]
    return [*(f"{key}={value}" for key, value in settings.items()), *more]


MISTAKES = {
    "unknown key": (["--grid", "optim.lrr=1,2"], "did you mean optim.lr?"),
    "wrong value": (["--grid", "optim.lr=1e-3,fast"], "optim.lr = 'fast'"),
    "swept and set": (["--grid", "optim.lr=1,2", "--optim.lr", "3"], "among the values to try, and also set"),
    "no equals sign": (["--grid", "optim.lr"], "'optim.lr': write key=value,value"),
    "twice": (["--grid", "optim.lr=1,2", "optim.lr=3"], "optim.lr is given twice"),
    "equal values": (["--grid", "optim.lr=1,1"], "the values must differ"),
    "too many": (["--grid", "model.width=4,5", "--trials", "3"], "--trials 3: must be from 1 to 2, the number of"),
    "its own array": (["--grid", "optim.lr=1,2", "--slurm", "--slurm.array", "0-3"], "the sweep numbers its runs"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_before_the_first_run(tmp_path: Path, name: str) -> None:
    given, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        sweep.main(words(tmp_path, *given))
    assert list(tmp_path.iterdir()) == []


def test_names_are_short_and_safe() -> None:
    assert run_name({"optim.lr": "1e-2", "model.width": "16"}) == "lr=1e-2_width=16"
    assert run_name({"optim.lr": "1"}, taken=["lr=1", "lr=1_2"]) == "lr=1_3"
    name = run_name({"loss": "{$REPLACE: true, a/b: {type: torch.nn.MSELoss}}"})
    assert not set(name) & set("/ {}:$'\"")
    assert len(run_name({"loss": "x" * 300})) < 110


def test_lists_are_one_value() -> None:
    assert read_space(["a.b=[1,2],[3]", 'c={x: 1, y: "1,2"},d']) == {
        "a.b": ["[1,2]", "[3]"], "c": ['{x: 1, y: "1,2"}', "d"],
    }  # fmt: skip


def test_some_combinations_at_random() -> None:
    """All different; more of them begin with the same ones, and another seed with others."""
    space = read_space([f"{key}=1,2,3,4,5" for key in "abc"])
    found = grid(space, 100, seed=1)
    assert len({tuple(each.values()) for each in found}) == 100
    assert found[:20] == grid(space, 20, seed=1)
    assert found[:20] != grid(space, 20, seed=2)
    assert len(grid(space, 125)) == 125
    assert len(grid(read_space([f"key{number}=1,2,3,4,5,6,7,8,9" for number in range(20)]), 3)) == 3


def test_runs_at_a_time_share_the_gpus_equally() -> None:
    assert devices([0, 1, 2, 3], 2) == [["--gpu_ids=0,2"], ["--gpu_ids=1,3"]]
    assert devices([0, 1, 2], 2) == [["--gpu_ids=0"], ["--gpu_ids=1"]]
    assert devices([4, 5], 3) == [["--gpu_ids=4"], ["--gpu_ids=5"], ["--gpu_ids=4"]]
    assert devices(-1, 2) == devices("mps", 2) == [[], []]
    assert devices([0, 1], 1) == [[]]


def test_a_slurm_array_has_a_task_for_each_run_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script gets their configs, names and numbers; the template's tests submit to a real Slurm."""
    script = tmp_path / "slurm.sh"
    monkeypatch.setattr(sweep, "SLURM", script)
    given = words(tmp_path, "--grid", "optim.lr=1e-2,1e-3", "model.width=4,8", "--jobs", "2", "--slurm.time", "5")
    monkeypatch.setattr(sweep, "PROJECT", tmp_path)
    with pytest.raises(UserError, match=r"this project has no slurm.sh; train here with --jobs N"):
        sweep.main([*given, "--dir.data_dir", str(PROJECT / "data")])
    script.write_text(f'printf "%s\\n" "$@" >{tmp_path}/called\n')
    assert sweep.main(given) == 0
    assert "python -m tools.sweep" in capfd.readouterr().out
    called, trials = (tmp_path / "called").read_text().splitlines(), tmp_path / "tried" / "trials"
    assert called == [
        f"--slurm.names={trials}/names.json", "--slurm.array=0,1,2,3%2", "--slurm.time", "5",
        f"--config={trials}/%a.yaml", "--name=tried", f"--dir.runs_dir={tmp_path}", "--resume=auto",
    ]  # fmt: skip
    assert json.loads((trials / "names.json").read_text())["2"] == "lr=1e-3_width=4"
    assert "lr: 0.001" in (trials / "2.yaml").read_text()
    finished = tmp_path / "tried" / "lr=1e-2_width=8"
    finished.mkdir()
    (finished / "config.yaml").write_text((trials / "1.yaml").read_text())
    (finished / "status.json").write_text(json.dumps({"state": "finished", "reason": ""}))
    assert sweep.main(given) == 0
    assert "--slurm.array=0,2,3%2" in (tmp_path / "called").read_text().splitlines()


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with `PLUGIN`."""
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / "spoiler.py").write_text(PLUGIN)
    return folder


def command(tmp_path: Path, plugin: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    given = words(tmp_path, "--plugins=[spoiler:begin]", "--progress.epoch_save_latest=1step", *more)
    path = f"{PROJECT}{os.pathsep}{plugin}"
    return [sys.executable, "-m", "tools.sweep", *given], {**ENVIRONMENT, "PYTHONPATH": path}


def states(folder: Path) -> dict[str, str]:
    """Return the state of each run by its name."""
    return {file.parent.name: json.loads(file.read_text())["state"] for file in sorted(folder.glob("*/status.json"))}


@pytest.mark.slow
def test_a_failing_run_does_not_end_the_sweep(tmp_path: Path, plugin: Path) -> None:
    """The others finish and are compared; the same command trains what is missing, and another space is an error."""
    line, environment = command(tmp_path, plugin, "--grid", "optim.lr=1e-2,1e-3", "model.width=4,8")
    (plugin / "spoil").touch()
    done = run(line, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    folder = tmp_path / "tried"
    assert list(states(folder).values()) == ["finished", "failed", "finished", "finished"]
    assert "failed: lr=1e-2_width=8: RuntimeError: this run is to fail" in done.stdout
    assert "1 of 4 runs did not finish" in done.stdout
    assert "width" in done.stdout.split("4/4")[-1]  # the table shows what differs
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    (plugin / "spoil").unlink()
    done = run(line, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(states(folder).values()) == ["finished"] * 4
    changed = [
        path.parent.name for path in folder.glob("*/metrics.jsonl") if path.stat().st_mtime_ns != before.get(path)
    ]
    assert changed == ["lr=1e-2_width=8"]
    line, _ = command(tmp_path, plugin, "--grid", "optim.lr=1e-2", "model.width=4", "--optim.weight_decay=0.1")
    done = run(line, env=environment)
    assert done.returncode == 2
    assert "optim.weight_decay 0.0 -> 0.1" in done.stderr
    assert "another --name" in done.stderr


@contextmanager
def started(line: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        line, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 100
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends the runs of a killed sweep")
def test_a_stopped_or_killed_sweep_continues(tmp_path: Path, plugin: Path) -> None:
    line, environment = command(tmp_path, plugin, "--grid", "optim.lr=1e-2,1e-3,1e-4", "--jobs", "2", "--model.width=4")
    folder, first = tmp_path / "tried", "lr=1e-2"
    (plugin / "slow").touch()
    with started(line, environment) as process:
        wait_for(folder / first / "checkpoints" / "latest.pt", process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert "continue with:\n  python -m tools.sweep " in output
    assert states(folder)[first] == "stopped"
    assert (folder / first / "run.lock").exists() is False
    with started(line, environment) as process:
        wait_for(folder / first / "run.lock", process)
        pid = json.loads((folder / first / "status.json").read_text())["pid"]
        process.kill()
        process.wait()
        end = time.monotonic() + 20
        while is_alive(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_alive(pid), "the run of a killed sweep trains on"
    (plugin / "slow").unlink()
    done = run(line, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(states(folder).values()) == {"finished"}
    assert "resumed at step" in (folder / first / "train.log").read_text()
    runs = sorted(path.name for path in folder.iterdir() if (path / "run.json").exists())
    assert runs == ["lr=1e-2", "lr=1e-3", "lr=1e-4"]
