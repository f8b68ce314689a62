"""Machines as people have them: closed streams, small limits, no home, other encodings, quotas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.base.errors import UserError
from common.base.files import without_tilde
from common.base.process import _cpu_quotas
from common.distributed import Rank
from common.failure.report import describe
from common.monitor import fonts
from tests.conftest import ENVIRONMENT, PROJECT, Runs, run

SHORT = ["--progress.epoch", "1", "--progress.max_steps", "2"]


def shell(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script; its arguments are `words`."""
    return run(["bash", "-c", script, "bash", *words], env={**ENVIRONMENT, **variables})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run."""
    return Runs(tmp_path_factory.mktemp("runs")).train(*SHORT)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed(runs: Runs, closed: str) -> None:
    done = shell(f'"$0" train.py "$@" {closed}'.replace("$0", sys.executable), *runs.words(*SHORT))
    assert done.returncode == 0, done.stderr
    assert "finished at epoch 1" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.parametrize("program", ["evaluate.py --model_pt", "-m tools.runs"])
def test_programs_without_streams(trained: Path, program: str) -> None:
    done = shell(f'"{sys.executable}" {program} "$1" >&- 2>&-', str(trained))
    assert done.returncode == 0


@pytest.mark.parametrize(("output", "code"), [("| true", 0), ("> /dev/full", 1)])
def test_an_evaluation_is_written_before_it_is_printed(trained: Path, tmp_path: Path, output: str, code: int) -> None:
    """Whoever reads the output may have left."""
    words = ["--model_pt", str(trained), "--dir.eval_dir", str(tmp_path / "eval")]
    done = shell(f'"{sys.executable}" evaluate.py "$@" {output}; exit ${{PIPESTATUS[0]}}', *words)
    assert done.returncode == code
    assert "loss" in (tmp_path / "eval" / "metrics.json").read_text()
    assert not (tmp_path / "eval" / "error_rank0.txt").exists()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container often runs with a user id that /etc/passwd does not list."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    fonts._files.cache_clear()
    assert isinstance(fonts.font_for("digit", 12), object)
    with pytest.raises(UserError, match=r"dir.runs_dir: ~/runs: .* set HOME"):
        without_tilde("~/runs", "dir.runs_dir")


@pytest.mark.parametrize(
    ("words", "variables"),
    [(["--name", b"caf\xe9"], {}), ([b"--na\xe9"], {}), (["--name", "${env:PLACE}"], {"PLACE": b"caf\xe9"})],
    ids=["value", "name", "environment"],
)
def test_bytes_that_are_not_utf8(runs: Runs, words: list[bytes], variables: dict[str, bytes]) -> None:
    command = [sys.executable, "train.py", "--config", str(PROJECT / "tests" / "base.yaml"), *words]
    done = subprocess.run(command, cwd=PROJECT, env={**ENVIRONMENT, **variables}, capture_output=True, check=False)
    assert done.returncode == 2 and b"is not UTF-8" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/job/task\n", {"job/cpu.max": "150000 100000", "job/task/cpu.max": "max 100000"}, [2]),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, [1]),
        ("0::/../other\n", {"cpu.max": "400000 100000"}, [4]),
        ("1:cpuacct,cpu:/on/host\n0::/\n", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, [3]),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("4:memory:/x\n", {}, []),
    ],
)
def test_cpu_quotas(tmp_path: Path, groups: str, files: dict[str, str], cores: list[int]) -> None:
    """Of both versions of control groups, with the path of the host or of the container."""
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
    """The message ends with what to do."""
    program = f'"{sys.executable}" train.py "$@"'
    done = run(
        ["unshare", "-rm", "bash", "-c", f"{limit}; {program}", "bash", *runs.words(*SHORT, "--num_workers", "2")]
    )
    assert done.returncode != 0
    (hint,) = [line for line in done.stderr.splitlines() if line.startswith("  hint ")]
    assert LIMITS[limit] in hint and "--num_workers 0" in hint


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
    assert remedy in describe(error, Rank()).hint
