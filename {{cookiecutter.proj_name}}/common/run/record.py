"""Where a run came from: the code's version, the machine, the command line, and a script that repeats it."""

import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.run.status import now

_GIT_TIMEOUT = 5.0  # seconds for each of at most two calls; a hanging network disk must not hold up a run
SNAPSHOT = ".snapshot.json"  # in a copy of the code: the git state of what it was copied from
_MAX_DIFF = 10 * 2**20  # bytes; more is somebody's data, not code
# Variables that change results and hold no secrets. The environment as a whole is never recorded: it holds tokens.
RESULT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
_REPEATED = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", *RESULT_VARIABLES)  # the first two show in torch's settings


@dataclass(frozen=True)
class GitState:
    """The code's version. `commit` is None and `note` says why when there is none."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    untracked: list[str] = field(default_factory=list)
    diff: bytes = b""
    note: str = ""

    def __str__(self) -> str:
        if self.commit is None:
            return f"unknown ({self.note})"
        changes = " + uncommitted changes" if self.dirty else ""
        return f"{self.commit[:12]} on {self.branch}{changes}"

    def patch(self) -> bytes:
        """`git.diff`: lines of comment, then what `git apply` needs to get from the commit to the code that ran."""
        head = [f"# git: {self}", *(f"# not tracked, so not in here: {name}" for name in self.untracked)]
        if self.note and self.commit is not None:
            head.append(f"# {self.note}")
        # Names come from the file system and need not be UTF-8.
        return "\n".join(head).encode(errors="surrogateescape") + b"\n" + self.diff

    def to_json(self) -> str:
        """For `from_json`, in a copy of the code."""
        return json.dumps({**vars(self), "diff": self.diff.decode(errors="surrogateescape")}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "GitState":
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "diff": values["diff"].encode(errors="surrogateescape")})


class _GitError(Exception):
    pass


def git_state(project: Path) -> GitState:
    """Ask git about the folder `project`. Never fails, and takes two git calls at most."""
    if is_copy(project):  # no repository, though it may lie inside one
        return GitState.from_json((project / SNAPSHOT).read_text())
    try:
        status = _git(project, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal", "--", ".")
    except _GitError as error:
        return GitState(note=str(error))
    branch, commit, dirty = "?", None, False
    untracked: list[str] = []
    entries = iter(os.fsdecode(status).split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if rest.startswith("branch.oid "):
            commit = rest.split()[1]
        elif rest.startswith("branch.head "):
            branch = rest.removeprefix("branch.head ")
        elif kind == "?":
            untracked.append(rest)
        elif kind in ("1", "2", "u"):
            dirty = True
            if kind == "2":  # a rename: the next entry is its old name
                next(entries, None)
    if commit is None or commit == "(initial)":
        return GitState(note="no commit yet", dirty=dirty, untracked=untracked)
    diff, note = _diff(project) if dirty else (b"", "")
    return GitState(commit, branch, dirty, untracked, diff, note)


def is_copy(project: Path) -> bool:
    """Whether this code was copied for a job, see `common.slurm.submission`, and so is just what ran."""
    return (project / SNAPSHOT).is_file()


def git_files(project: Path) -> list[str]:
    """The files below `project` that git knows or does not ignore, relative to it; none where there is no git."""
    try:
        listed = _git(project, "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "-z")
    except _GitError:
        return []
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _diff(project: Path) -> tuple[bytes, str]:
    try:
        # No external diff programs or text filters: they are the user's, and may run anything.
        diff = _git(project, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", ".")
    except _GitError as error:
        return b"", f"no diff: {error}"
    if len(diff) > _MAX_DIFF:
        return b"", f"no diff: it has {len(diff) / 2**20:.0f} MB"
    return diff, ""


def _git(project: Path, *arguments: str) -> bytes:
    # GIT_DIR and its kin are set inside git's hooks and would point at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _GitError(f"git took longer than {_GIT_TIMEOUT:.0f} s") from error
    except OSError as error:
        raise _GitError(f"git cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"git ended with {done.returncode}"]
        raise _GitError(reason[0].removeprefix("fatal: "))
    return done.stdout


def describe(project: Path, argv: Sequence[str], seed: int, world_size: int, git: GitState) -> dict[str, Any]:
    """One attempt's entry in `run.json`; plain values only."""
    return {
        "time": now(),
        "command": shlex.join([sys.executable, *argv]),
        "argv": list(argv),
        "working_directory": str(Path.cwd()),
        "seed": seed,
        "world_size": world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "git": {
            "commit": git.commit,
            "branch": git.branch,
            "dirty": git.dirty,
            "untracked": git.untracked,
            "note": git.note,
        },
        "versions": _versions(project),
        "cpu_threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in _REPEATED if name in os.environ},
    }


def _versions(project: Path) -> dict[str, str | None]:
    template = project / "common" / "VERSION"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "template": template.read_text().strip() if template.is_file() else None,
        "system": platform.platform(),
    }


def environment_text(attempt: dict[str, Any]) -> str:
    """The banner a log begins with: machine, versions, code, seed. One line each."""
    versions, git = attempt["versions"], attempt["git"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name != "system")
    code = GitState(git["commit"], git["branch"], git["dirty"], note=git["note"])
    return (
        f"machine   {attempt['host']}, {versions['system']}\n"
        f"versions  {known}\n"
        f"code      git {code}\n"
        f"run       {attempt['world_size']} process(es) by {attempt['launcher']}, seed {attempt['seed']}, "
        f"{attempt['cpu_threads']} CPU threads each\n"
        f"command   {attempt['command']}"
    )


def job_script(run: Path, project: Path, attempt: dict[str, Any], gpus: bool = False) -> str:
    """A POSIX shell script, to lie in the folder `run`, that repeats the run as `<name>_replicate` from anywhere.

    Args:
        gpus: each process has one.
    """
    entry = _entry(attempt["argv"], project)
    meeting, launch = _launch(attempt, gpus)
    exports = [
        f': "${{{name}:={value}}}"\nexport {name}'
        for name, value in attempt["environment"].items()
        if re.fullmatch(r"[\w.,:+-]+", value)
    ]
    commit, dirty, copy = attempt["git"]["commit"] or "", attempt["git"]["dirty"], is_copy(project)
    name = f"{run.name}_replicate"
    lines = [
        "#!/bin/sh",
        f"# Repeats the run {_comment(run.name)} of {attempt['time']}, under the name {_comment(name)}.",
        "# Further arguments are appended:  sh job.sh --progress.epoch 3",
        "set -eu",
        'run=$(CDPATH="" cd -P -- "$(dirname -- "$0")" && pwd)',
        f"project={_project(run, project)}",
        f"python={shlex.quote(sys.executable)}",
        '[ -x "$python" ] || python=python3',
        "python=${PYTHON:-$python}  # PYTHON=... sh job.sh takes another one",
        'cd -- "$project" || exit 1',
        *exports,
        *(_GIT_CHECK.format(commit=commit).splitlines() if commit and not copy else []),
        *(['echo "warning: that run had uncommitted changes, see $run/git.diff" >&2'] if dirty and not copy else []),
        *meeting,
        f'exec {launch} {shlex.quote(entry)} --config "$run/config.yaml" \\',
        f'    --name {shlex.quote(name)} --dist.random_seed {attempt["seed"]} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _launch(attempt: dict[str, Any], gpus: bool) -> tuple[list[str], str]:
    """What starts as many processes on as many hosts as there were, and lines that must come before."""
    world, each = attempt["world_size"], attempt["processes_per_host"]
    hosts = -(-world // each)
    if hosts > 1 and attempt["launcher"] == "slurm":
        asked = f"--nodes={hosts} --ntasks={world} --ntasks-per-node={each}" + gpus * f" --gpus-per-node={each}"
        return [], f'srun {asked} --kill-on-bad-exit=1 "$python"'
    torchrun, processes = '"$python" -m torch.distributed.run', f"--nproc-per-node={each}"
    if hosts > 1:
        meeting = '--rdzv-backend=c10d --rdzv-id="$run" --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"'
        return _ON_EACH_HOST.format(hosts=hosts).splitlines(), f"{torchrun} --nnodes={hosts} {processes} {meeting}"
    return [], f"{torchrun} --standalone {processes}" if world > 1 else '"$python"'


_ON_EACH_HOST = """\
if [ -z "${{MASTER_ADDR:-}}" ]; then
    echo "that run had {hosts} hosts; type this on each of them:" >&2
    echo "  MASTER_ADDR=<name of the first host> sh '$run/job.sh'" >&2
    exit 2
fi"""
_GIT_CHECK = """\
recorded={commit}
current=$(git rev-parse HEAD 2>/dev/null || echo unknown)
if [ "$current" != "$recorded" ]; then
    echo "warning: the code is at commit $current, that run was at $recorded" >&2
fi"""


def _entry(argv: Sequence[str], project: Path) -> str:
    """The script that was run, relative to the project when it lies there."""
    script = Path(argv[0]).resolve() if argv else Path()
    if script.suffix == ".py" and script.is_file() and script.is_relative_to(project.resolve()):
        return str(script.relative_to(project.resolve()))
    return "train.py"


def _project(run: Path, project: Path) -> str:
    """Shell text for the project's root: relative to the run's folder where possible, so that both can be moved."""
    run, project = run.resolve(), project.resolve()
    if is_copy(project):  # it lies in the run's folder or, for a task of an array, beside it
        return f'"$run/{os.path.relpath(project, run)}"'
    if run.is_relative_to(project):
        return '"$run/' + "/".join([".."] * len(run.relative_to(project).parts)) + '"'
    return shlex.quote(str(project))


def _comment(text: str) -> str:
    return " ".join(text.split())
