"""`job.sh`, which repeats a run."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.run.git import is_copy


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
