"""A real Slurm on this machine for as long as a test needs it: one controller and a few virtual nodes, without systemd.

Every daemon runs in the foreground as our own child, so that it can be ended by its process id whatever happens.
"""

import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PACKAGES = {"munge": ["munged"], "slurm-wlm": ["slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "squeue"]}
PARTITIONS = """\
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=low_grace Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=bare Nodes=n[3-4] MaxTime=INFINITE State=UP
PartitionName=apart Nodes=n5 MaxTime=INFINITE State=UP
"""
CONFIG = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=8
MinJobAge=600
ReturnToService=2
JobRequeue=1
SlurmdParameters=config_overrides
"""


class Cluster:
    """A running Slurm of five nodes.

    n1 and n2 have 2 (fake) GPUs each; n1 is also where jobs of the partitions low and low_grace (30 s to leave) make
    room for those of high. n3 and n4, in partition bare, are without `scontrol`. n5 is apart.

    Args:
        root: an empty folder for everything that the daemons write; its path must be short, as sockets lie in it.
        cpus: CPUs that each node claims to have, however many there are.
    """

    def __init__(self, root: Path, cpus: int = 4) -> None:
        self.root = root
        self.nodes = ["n1", "n2", "n3", "n4", "n5"]
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._of_nodes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write(cpus)
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def version(self) -> str:
        return self.call("sinfo", "--version").removeprefix("slurm ").removeprefix("slurm-wlm ")

    def __str__(self) -> str:
        return f"slurm {self.version}: {len(self.nodes)} nodes"

    def _write(self, cpus: int) -> None:
        for name in ("run", "state", "log", "munge", *(f"spool/{node}" for node in self.nodes)):
            (self.root / name).mkdir(parents=True)
        (self.root / "munge").chmod(0o700)
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(host=host, port=ports[0], root=self.root)
        for node, port in zip(self.nodes, ports[1:], strict=True):
            gpus = 2 if node in ("n1", "n2") else 0
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000"
                f" Gres=gpu:{gpus} State=UNKNOWN\n"
            )
        (self.root / "slurm.conf").write_text(text + PARTITIONS)
        for number in (0, 1):  # any device file will do; this is /dev/null
            os.mknod(self.root / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.root / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={self.root}/gpu[0-1]\n")
        # Host names must lead somewhere inside jobs: the first one is where the processes meet.
        lines = [f"127.0.0.1 localhost {socket.gethostname()}", *(f"127.0.0.1 {node}" for node in self.nodes)]
        (self.root / "hosts").write_text("\n".join(lines) + "\n")
        (self.root / "nothing").write_text("")

    def _start(self) -> None:
        place = self.root / "run"
        self._spawn(
            "munged", "--foreground", "--force", f"--key-file={self.root}/munge/key",
            f"--socket={place}/munge.sock", f"--pid-file={place}/munged.pid", f"--log-file={self.root}/log/munged.log",
            f"--seed-file={self.root}/munge/seed",
        )  # fmt: skip
        self.wait("munged", lambda: (place / "munge.sock").exists())
        self._spawn("slurmctld", "-D")
        for node in self.nodes:
            self.power_on(node)
        self.wait("all nodes", lambda: self.idle() == set(self.nodes))

    def power_on(self, node: str) -> None:
        """Start a node's daemon, under a host name of its own."""
        # An empty file over scontrol, seen by this node alone.
        hide = 'mount --bind "$1/nothing" "$(command -v scontrol)";' if node in ("n3", "n4") else ""
        script = f'{hide} mount --bind "$1/hosts" /etc/hosts && hostname "$2" && exec slurmd -D -N "$2"'
        self._of_nodes[node] = self._spawn(
            "unshare", "--mount", "--uts", "sh", "-c", script, "sh", str(self.root), node
        )

    def power_off(self, node: str) -> None:
        """End everything that runs on a node, as if its plug were pulled; Slurm learns at once that it is down."""
        daemon = self._of_nodes[node]
        place = _host_of(daemon.pid)
        assert place not in (None, _host_of(os.getpid())), "this would end everything on this machine"
        for pid in [pid for pid in _processes() if _host_of(pid) == place]:
            _kill(pid)
        daemon.wait()
        self.call("scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.root / "log" / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._daemons.append(daemon)
        return daemon

    def idle(self) -> set[str]:
        """Return the nodes that are up and have nothing to do."""
        done = self._run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        return set(done.stdout.split())

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30, check=False)

    def call(self, *command: str) -> str:
        """Run one of Slurm's programs; its output. Raises `AssertionError` when it fails."""
        done = self._run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def wait(self, what: str, until: Callable[[], object], patience: float = 60) -> None:
        """Look ten times a second until `until` holds. Raises `AssertionError` with the cluster's own logs."""
        end = time.monotonic() + patience
        while not until():
            if time.monotonic() > end:
                raise AssertionError(f"waited {patience:.0f} s in vain for {what}\n{self.report()}")
            time.sleep(0.1)

    def report(self) -> str:
        """Return the queue and the ends of the logs, for a failure message."""
        logs = [f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in self.root.glob("log/*.log")]
        return "\n".join([self._run("squeue", "-t", "all").stdout, *logs])

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ... of a job or of one task (17_2); "" when Slurm has forgotten it."""
        found = re.search(r"JobState=(\w+)", self._run("scontrol", "-o", "show", "job", job).stdout)
        return found[1] if found else ""

    def field(self, job: str, name: str) -> str:
        """Return one `Name=value` of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.call("scontrol", "-o", "show", "job", job))
        return found[1] if found else ""

    def hurry(self, job: str) -> None:
        """Let a waiting job start now; one that starts by itself this very moment is left alone."""
        self._run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def stop(self) -> None:
        """Cancel every job, then end every daemon and whatever a job left behind. Safe to call twice."""
        if len(self._daemons) > 1:
            self._give_up_jobs()
        for daemon in reversed(self._daemons):  # munged last: the others talk through it
            _end(daemon)
        self._daemons = []
        needle = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for pid in [pid for pid in _processes() if needle in _environment(pid)]:
            _kill(pid)  # a step detaches itself from its daemon

    def _give_up_jobs(self) -> None:
        try:
            self._run("scancel", "--user=root")
            end = time.monotonic() + 10
            while self._run("squeue", "-h").stdout and time.monotonic() < end:
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            pass  # a controller that does not answer is ended below all the same


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _die_with_parent() -> None:
    """Also when this process is killed, nothing of the cluster stays behind but its steps, which then end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _processes() -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != str(os.getpid())
    ]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it ended meanwhile


def _host_of(pid: int) -> str | None:
    """Return what tells the processes of one node from those of another: each node has a host name of its own."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Ports without a listener, which neither the kernel nor our jobs choose: a daemon finds its own again."""
    found: set[int] = set()
    while len(found) < count:
        port = 30000 + secrets.randbelow(2700)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)
