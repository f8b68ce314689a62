"""Machines as people have them: small limits, other encodings, quotas."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import pytest

from common.base.process import _cpu_quotas
from common.distributed import Rank
from common.failure.report import describe
from parts.advice.explain import explain
from tests.conftest import ENVIRONMENT, PROJECT, Runs, run

SHORT = ["--progress.epoch", "1", "--progress.max_steps", "2"]


F_SETPIPE_SZ = 1031  # of fcntl(2), on Linux


def shell(script: str, *words: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """Run a shell script; its arguments are `words`."""
    return run(["bash", "-c", script, "bash", *words], cwd=cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run."""
    return Runs(tmp_path_factory.mktemp("runs")).train(*SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["| true", "> /dev/full"])
def test_an_evaluation_is_written_before_it_is_printed(trained: Path, tmp_path: Path, output: str) -> None:
    """Whoever reads the output may have left."""
    words = ["--model_pt", str(trained), "--dir.eval_dir", str(tmp_path / "eval")]
    done = shell(f'"{sys.executable}" evaluate.py "$@" {output}; exit ${{PIPESTATUS[0]}}', *words)
    assert done.returncode == 1
    assert "loss" in (tmp_path / "eval" / "metrics.json").read_text()


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/job/task\n", {"job/cpu.max": "150000 100000", "job/task/cpu.max": "max 100000"}, [2]),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, [1]),
        ("0::/../other\n", {"cpu.max": "400000 100000"}, [4]),
        ("4:memory:/x\n", {}, []),
    ],
)
def test_cpu_quotas(tmp_path: Path, groups: str, files: dict[str, str], cores: list[int]) -> None:
    """With the path of the host or of the container."""
    for name, text in {"groups": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(_cpu_quotas(tmp_path / "groups", tmp_path)) == cores


LIMITS = {
    "mount -t tmpfs -o size=32k tmpfs /dev/shm": "--shm-size",
    "mount -t tmpfs -o ro tmpfs /dev/shm": "--shm-size",
    "ulimit -n 32": "ulimit -n",
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_a_machine(runs: Runs, limit: str) -> None:
    """The message says what to do."""
    program = f'"{sys.executable}" train.py "$@"'
    done = run(
        ["unshare", "-rm", "bash", "-c", f"{limit}; {program}", "bash", *runs.words(*SHORT, "--num_workers", "2")]
    )
    assert done.returncode != 0
    assert LIMITS[limit] in done.stderr and " --num_workers " in done.stderr


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("received 0 items of ancdata"), "ulimit -n"),
        (
            RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space (28)"),
            "shm",
        ),
        (OSError(28, "No space left on device", "/data/x"), "df -i"),
    ],
)
def test_errors_of_a_machine_have_a_hint(error: Exception, remedy: str) -> None:
    with pytest.raises(type(error)), explain():
        raise error
    assert remedy in describe(error, Rank()).hint


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
def test_python_that_leaves_out_the_folder_of_the_script() -> None:
    """With -I, as with -P, of which it is more."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    for program in map(str, PROJECT.glob("*.py")):
        assert run([sys.executable, "-I", program, "--help"], env=environment).returncode == 0


@pytest.mark.slow
def test_a_terminal_that_nobody_reads(runs: Runs) -> None:
    """A full pipe keeps a run from writing; SIGTERM still saves and ends it."""
    words = runs.words("--progress.epoch", "1000", "--progress.log_every", "1")
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
    command = [sys.executable, "train.py", *words]
    with subprocess.Popen(command, cwd=PROJECT, env=ENVIRONMENT, stdout=writer, stderr=writer) as process:
        os.close(writer)
        text = b""
        while b"| loss " not in text:
            text += os.read(reader, 4096)
        waiting = array("i", [0])
        while waiting[0] < 4096 - 300:  # bytes in the pipe: the next line does not fit
            fcntl.ioctl(reader, termios.FIONREAD, waiting)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    os.close(reader)
    assert (runs.root / "run" / "checkpoints" / "latest.pt").exists()
    assert "stopping after this step" in (runs.root / "run" / "train.log").read_text()
