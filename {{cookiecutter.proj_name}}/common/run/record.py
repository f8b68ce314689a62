"""The record of a start in `run.json`: the command line as typed, the code's version, packages, the machine."""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common.base.errors import UserError
from common.distributed import Rank
from common.run.paths import RunPaths
from common.run.status import now

SNAPSHOT = ".snapshot.json"  # in a copy of the code: the git state of the original
_TIMEOUT_S = 5.0  # for each call: a hanging network disk must not hold up a run
_version = cache(metadata.version)  # each look-up reads a file


@dataclass
class GitState:
    """The code's version; `note` is git's error, if any.

    Attributes:
        diff: for `git apply`; bytes that are not UTF-8 are kept as surrogates.
    """

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    untracked: list[str] = field(default_factory=list)
    note: str = ""
    diff: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.commit is None:
            return f"unknown ({self.note})"
        text = f"{self.commit[:12]} on {self.branch}"
        if self.dirty:
            text += " + uncommitted changes"
        if self.untracked:
            text += f" + {len(self.untracked)} untracked (run.json)"
        return text


def git_state(project: Path) -> GitState:
    """Return the git state of the folder `project`. Never fails."""
    if is_copy(project):  # not a repository, though it may lie inside one
        return GitState(**json.loads((project / SNAPSHOT).read_text()))
    state = GitState()
    try:
        state.commit, state.branch = _git(project, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        state.dirty = True  # until the diff says otherwise
        # No external diff programs or text filters: the user configures them, and they may run anything.
        state.diff = _git(
            project, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", "."
        )
        state.untracked = git_files(project, "--others", "--directory")
        state.dirty = bool(state.diff)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        state.note = " ".join(said.split()) or str(error)
    return state


def is_copy(project: Path) -> bool:
    """Return whether this code was copied for a job, and so is exactly what ran."""
    return (project / SNAPSHOT).is_file()


def git_files(project: Path, *options: str) -> list[str]:
    """Files that `git ls-files` lists below `project`, relative to it, without ignored ones.

    Raises:
        OSError, SubprocessError: there is no git, or no repository.
    """
    listed = _git(project, "ls-files", "--exclude-standard", "-z", *options)
    return [name for name in listed.split("\0") if name]


def _git(project: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", *arguments],
        cwd=project,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return done.stdout.decode(errors="surrogateescape")


def packages() -> dict[str, str]:
    """Return the versions of the packages that this process has imported, by module."""
    return versions_of({module for module in sys.modules if "." not in module} - sys.stdlib_module_names)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages by name, and of imported modules that have a `__version__`."""
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = _version(name)
        except (metadata.PackageNotFoundError, ValueError):
            version = getattr(sys.modules.get(name), "__version__", None)
            if isinstance(version, str):
                versions[name] = version
    return versions


def machine(device: torch.device) -> dict[str, str | int | bool]:
    """Record what affects the last digits of results on this machine: Python, processor, threads, GPU, settings."""
    cuda = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    conv = getattr(cudnn, "conv")  # noqa: B009 - not in its types
    gpu: dict[str, str | int | bool] = dict.fromkeys(("cudnn", "cudnn flags", "tf32"), "not used")
    if device.type == "cuda":
        gpu = {
            "device": torch.cuda.get_device_name(device),
            "cudnn": cudnn.version(),
            "cudnn flags": f"deterministic {cudnn.deterministic}, benchmark {cudnn.benchmark}",
            "tf32": f"matmul {cuda.fp32_precision}, conv {conv.fp32_precision}",
        }
    return {
        "python": platform.python_version(),
        "processor": _processor(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": f"{device.type} ({platform.machine()})",
        "cuda": torch.version.cuda or "none",
        **gpu,
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.get_deterministic_debug_mode() == 2,
    }


def _processor() -> str:
    """Return the model of the CPU: another may round differently."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


# Variables that change results and hold no secrets. The environment as a whole is never recorded: it may hold tokens.
_RESULT_VARIABLES = (
    "ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_", "NPY_", "KMP_DETERMINISTIC", "OMP_DYNAMIC", "CUBLAS", "CUDNN_",
    "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TORCH_BLAS", "NCCL_ALGO", "NCCL_PROTO", "PYTHONHASHSEED",
)  # fmt: skip
_REPEATED = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY")  # torch reports the effect of both


def result_variables() -> dict[str, str]:
    """Return the variables of this process' environment that change results."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_RESULT_VARIABLES) and "VERBOSE" not in name:
            found[name] = value
    return found


def describe_start(
    project: Path,
    argv: Sequence[str],
    seed: int,
    rank: Rank,
) -> tuple[dict[str, Any], str]:
    """Return one attempt's entry in `run.json`, of plain values only, and the text of its `git.diff`.

    That is a comment line, then a patch for `git apply`, from the commit to the code that ran.
    """
    version = None
    file = project / "common" / "VERSION"
    if file.is_file():
        version = file.read_text().strip()
    git = git_state(project)
    code = dict(vars(git))
    del code["diff"]
    repeated = {name: os.environ[name] for name in _REPEATED if name in os.environ}
    attempt = {
        "time": now(),
        "command": shlex.join([sys.executable, *argv]),
        "argv": list(argv),
        "working_directory": str(Path.cwd()),
        "seed": seed,
        "world_size": rank.world_size,
        "launcher": rank.launcher,
        "processes_per_host": rank.local_world,
        "launched_as": list(rank.launched_as),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "git": code,
        "template": version,
        "system": platform.platform(),
        "packages": packages(),
        "machine": machine(rank.device),
        "environment": repeated | result_variables(),
    }
    return attempt, f"# git: {git}\n{git.diff}"


def read_attempts(folder: RunPaths) -> list[dict[str, Any]]:
    """Read the entries of `run.json`, one for each start; none without that file."""
    if not folder.record_file.exists():
        return []
    try:
        return json.loads(folder.record_file.read_text())["attempts"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder.record_file} is damaged ({error}): restore it, or delete it") from error


def environment_text(attempt: dict[str, Any]) -> str:
    """Return the banner at the top of a log: machine, versions, code, seed, command. One line each."""
    machine = attempt["machine"]
    packages = attempt["packages"]
    return (
        f"machine   {attempt['host']}, {attempt['system']}\n"
        f"versions  python {machine['python']}, torch {packages['torch']}, numpy {packages['numpy']}, cuda "
        f"{machine['cuda']}, template {attempt['template']}\n"
        f"code      {GitState(**attempt['git'])}\n"
        f"run       processes: {attempt['world_size']} via {attempt['launcher']}, seed {attempt['seed']}, "
        f"CPU threads {machine['threads']}\n"
        f"command   {attempt['command']}"
    )
