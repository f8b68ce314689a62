"""What `run.json` keeps of a start: the command line, the machine, versions. Nothing secret."""

import os
import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.run.git import GitState
from common.run.status import now

# Variables that change results and hold no secrets. The environment as a whole is never recorded: it holds tokens.
RESULT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
_REPEATED = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", *RESULT_VARIABLES)  # the first two show in torch's settings


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
