"""The record of a start in `run.json`: the command line, the machine, versions. No secrets."""

import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from loguru import logger

from common.distributed import Rank
from common.run.environment import machine, packages
from common.run.git import GitState, git_state
from common.run.paths import RunPaths
from common.run.status import now

# Variables that change results and hold no secrets. The environment as a whole is never recorded: it may hold tokens.
RESULT_VARIABLES = (
    "ONEDNN_*", "DNNL_*", "MKL_*", "OPENBLAS_*", "NPY_*CPU_FEATURES", "KMP_DETERMINISTIC_REDUCTION", "OMP_DYNAMIC",
    "CUBLAS*", "CUDNN_*", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32*", "TORCH_BLAS*", "NCCL_ALGO", "NCCL_PROTO",
    "PYTHONHASHSEED",
)  # fmt: skip
_HARMLESS = ("*VERBOSE*", "*LOG*", "*PROFIL*")
_REPEATED = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY")  # torch reports the effect of both


def result_variables() -> dict[str, str]:
    """Return the variables of this process' environment that change results."""
    found = {}
    for name, value in sorted(os.environ.items()):
        is_listed = any(fnmatchcase(name, pattern) for pattern in RESULT_VARIABLES)
        is_harmless = any(fnmatchcase(name, pattern) for pattern in _HARMLESS)
        if is_listed and not is_harmless:
            found[name] = value
    return found


def describe_start(
    project: Path,
    argv: Sequence[str],
    seed: int,
    rank: Rank,
) -> tuple[dict[str, Any], str]:
    """Return one attempt's entry in `run.json`, of plain values only, and the text of its `git.diff`."""
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
    return attempt, git.patch()


def read_attempts(folder: RunPaths) -> list[dict[str, Any]]:
    """Read the entries of `run.json`, one for each start; none without that file."""
    if not folder.record_file.exists():
        return []
    try:
        record = json.loads(folder.record_file.read_text())
        attempts: list[dict[str, Any]] = record["attempts"]
    except (ValueError, TypeError, KeyError):
        logger.warning("{} is damaged, and counts as missing", folder.record_file)
        return []
    return attempts


def environment_text(attempt: dict[str, Any]) -> str:
    """Return the banner at the top of a log: machine, versions, code, seed, command. One line each."""
    machine = attempt["machine"]
    packages = attempt["packages"]
    return (
        f"machine   {attempt['host']}, {attempt['system']}\n"
        f"versions  python {machine['python']}, torch {packages['torch']}, numpy {packages['numpy']}, cuda "
        f"{machine['cuda']}, template {attempt['template']}\n"
        f"code      {GitState(**attempt['git'])}\n"
        f"run       {attempt['world_size']} process{'es' * (attempt['world_size'] > 1)} via {attempt['launcher']}, "
        f"seed {attempt['seed']}, {machine['threads']} CPU thread{'s' * (machine['threads'] > 1)} each\n"
        f"command   {attempt['command']}"
    )
