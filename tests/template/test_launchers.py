"""The rendered project under real mpirun, and on two hosts of its own network."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from real import REPORT, need
from support import Render

pytestmark = pytest.mark.slow

# No dropout and no batch norm: then only rounding depends on how many processes share a step.
SMALL = [
    "--config", "configs/default.yaml", "--model", "{$REPLACE: true, type: tests.small.Plain}", "--progress.epoch", "2",
    "--debug.max_samples", "160", "--monitor.writers", "[]", "--progress.epoch_eval", "-1",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Project:
    """A rendered project, and what one process makes of its data."""

    root: Path
    alone: dict[str, torch.Tensor]

    def words(self, name: str, batch_size: int, *more: str) -> list[str]:
        settings = {**dict(zip(SMALL[::2], SMALL[1::2], strict=True)), **dict(zip(more[::2], more[1::2], strict=True))}
        given = [word for pair in settings.items() for word in pair]
        return [sys.executable, "train.py", *given, "--name", name, "--batch_size", str(batch_size)]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        file = self.root / "experiments" / name / "checkpoints" / "latest.pt"
        return dict(torch.load(file, weights_only=True)["model"])

    def equals_one_process(self, name: str) -> bool:
        """Within 1e-6: gradients are added in another order."""
        found = self.weights(name)
        return all(torch.allclose(value, found[key], atol=1e-6) for key, value in self.alone.items())


@pytest.fixture(scope="module")
def project(render: Render, tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = Path(shutil.copytree(render(), tmp_path_factory.mktemp("launched") / "project"))
    project = Project(root, {})
    done = run(project.words("alone", 32), root)
    assert done.returncode == 0, done.stderr
    return Project(root, project.weights("alone"))


def run(command: Sequence[str], root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=root, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


MPIRUN = {
    "open-mpi": ("openmpi-bin", ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]),
    "mpich": ("mpich", ["mpiexec.hydra", "-n", "2"]),
}


@pytest.mark.parametrize("family", MPIRUN)
def test_mpirun(project: Project, family: str) -> None:
    """A real mpirun starts the processes, and they find each other."""
    package, command = MPIRUN[family]
    need({package: command[:1]})
    version = run([command[0], "--version"], project.root).stdout.split("\n")[0]
    done = run([*command, *project.words(family, 16)], project.root)
    assert done.returncode == 0, done.stderr
    assert "processes: 2 via mpi" in done.stderr + done.stdout
    assert project.equals_one_process(family)
    REPORT.append(f"{command[0]} ({version.strip()}): 2 processes")


@pytest.mark.parametrize("family", MPIRUN)
def test_a_failure_under_mpirun(project: Project, family: str, tmp_path: Path) -> None:
    """Whatever one process of several dies of, mpirun ends within 10 s, and not with 0."""
    package, command = MPIRUN[family]
    need({package: command[:1]})
    variable = "OMPI_COMM_WORLD_RANK" if family == "open-mpi" else "PMI_RANK"
    script = f'export RANK=${variable}; exec "$@"'
    words = project.words("failing", 16, "--model", "{type: tests.small.Breaks}", "--dist.launcher", "mpi")
    broke = tmp_path / "broke"
    variables = {"BREAKS": "raise 1 train 5", "BROKE": str(broke)}
    done = run([*command, "sh", "-c", script, "sh", *words], project.root, **variables)
    assert time.time() - broke.stat().st_mtime < 10
    assert done.returncode != 0
    assert "rank 1 failed" in done.stderr + done.stdout


@dataclass(frozen=True)
class Hosts:
    """Two hosts on one machine: network namespaces with a cable between them, and names of their own."""

    names: tuple[str, str]
    folder: Path

    def command(self, host: int, *words: str) -> list[str]:
        """`words`, to be run on a host."""
        enter = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; export GLOO_SOCKET_IFNAME=eth0; exec "$@"'
        place = ["ip", "netns", "exec", self.names[host], "unshare", "--mount", "--uts", "sh", "-c", enter, "sh"]
        return [*place, str(self.folder / "hosts"), self.names[host], *words]

    def unplug(self) -> None:
        subprocess.run(["ip", "-n", self.names[0], "link", "set", "eth0", "down"], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    need({"iproute2": ["ip"], "util-linux": ["unshare"]})
    names = (f"a{os.getpid()}", f"b{os.getpid()}")
    # As on Debian, a host's own name leads to a loopback address: what gloo offers its peers if left to itself.
    lines = ["127.0.0.1 localhost", *(f"10.77.0.{index} {name}" for index, name in enumerate(names, start=1))]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        cable = ["type", "veth", "peer", "name", "eth0", "netns", names[1]]
        subprocess.run(["ip", "link", "add", "eth0", "netns", names[0], *cable], check=True)
        for index, name in enumerate(names, start=1):
            subprocess.run(["ip", "-n", name, "addr", "add", f"10.77.0.{index}/24", "dev", "eth0"], check=True)
            for device in ("eth0", "lo"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield Hosts(names, tmp_path)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@dataclass
class Pair:
    """A program started on both hosts."""

    processes: list[subprocess.Popen[str]]
    outputs: list[Path]

    def wait(self, seconds: float) -> list[int]:
        return [each.wait(seconds) for each in self.processes]

    def texts(self) -> list[str]:
        return [output.read_text() for output in self.outputs]


Start = Callable[[Sequence[Sequence[str]], Sequence[dict[str, str]]], Pair]


@pytest.fixture
def start(hosts: Hosts, project: Project) -> Iterator[Start]:
    """start([words of host 0, words of host 1], [variables, variables]) -> Pair; ended by process id afterwards."""
    started: list[subprocess.Popen[str]] = []

    def call(words: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]) -> Pair:
        outputs = [hosts.folder / f"terminal{host}.txt" for host in (0, 1)]
        for host, output in enumerate(outputs):
            with output.open("w") as file:  # not a pipe, which would have to be read all the time
                process = subprocess.Popen(
                    hosts.command(host, *words[host]),
                    cwd=project.root,
                    env={**ENVIRONMENT, **variables[host]},
                    stderr=file,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            started.append(process)
        return Pair(started, outputs)

    yield call
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.wait(10)


def by_hand(host: int, hosts: Hosts) -> dict[str, str]:
    """Return what a launcher without a keeper sets: only our own code notices that a process has died."""
    place = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**place, "MASTER_ADDR": hosts.names[0], "MASTER_PORT": "29511"}


def running(project: Project, name: str) -> bool:
    log = project.root / "experiments" / name / "train.log"
    return log.exists() and "step" in log.read_text().rpartition("steps per epoch; intervals:")[2]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_torchrun_on_two_hosts(project: Project, hosts: Hosts, start: Start) -> None:
    """The c10d rendezvous over a network, with one process on each host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=x"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.names[0]}:29400"]
    pair = start([[*launcher, *project.words("two_hosts", 16)[1:]]] * 2, [{}, {}])
    codes = pair.wait(100)
    assert codes == [0, 0], pair.texts()
    assert project.equals_one_process("two_hosts")
    REPORT.append("torchrun, c10d: 2 hosts in network namespaces")


LONG = ["--progress.epoch", "100000", "--progress.epoch_val", "-1", "--progress.log_every", "1"]


def test_a_killed_process_on_another_host(project: Project, hosts: Hosts, start: Start) -> None:
    """Without a launcher that would notice; the kernel of the other host closes the connection."""
    words = project.words("killed", 16, *LONG)
    pair = start([words, words], [by_hand(host, hosts) for host in (0, 1)])
    until(lambda: running(project, "killed"))
    os.killpg(pair.processes[1].pid, signal.SIGKILL)
    assert pair.processes[0].wait(15) == 1
    report = pair.texts()[0]
    assert "rank 1 failed" in report
    assert f"on {hosts.names[1]}" in report
    assert "exited without an error message" in report


def test_a_cut_cable(project: Project, hosts: Hosts, start: Start) -> None:
    """No process has failed, but after dist.timeout none continues waiting."""
    words = project.words("cut", 16, *LONG, "--dist.timeout", "4")
    pair = start([words, words], [by_hand(host, hosts) for host in (0, 1)])
    until(lambda: running(project, "cut"))
    hosts.unplug()
    codes = pair.wait(30)
    assert all(codes)
    assert "dist.timeout" in pair.texts()[0]
