"""Write `job.sh`, a script that repeats a run."""

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.base.files import PROJECT, warn_on_oserror, write_text
from common.run.record import is_copy
from common.run_context import RunContext
from common.trainer import Trainer

_SCRIPT = """\
#!/bin/sh
# Repeats the run {shown} of {time}, under the name {shown}_replicate.
# Further arguments are appended:  sh job.sh --progress.epoch 3
set -eu
run=$(CDPATH="" cd -P -- "$(dirname -- "$0")" && pwd)
project={project}
python=${{PYTHON:-{python}}}  # PYTHON=... sh job.sh uses another interpreter
cd -- "$project" || exit 1
case "$* $(grep "^resume:" "$run/config.yaml")" in
    *--resume*) ;;
    *"resume: auto") set -- --resume null "$@" ;;  # else a second call would continue the first
esac
{preparations}exec {launch} {script} --config "$run/config.yaml"{launcher} \\
    --name {name} --dist.random_seed {seed} "$@"
"""
_GIT_CHECK = """\
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ "$commit" = {commit} ] || echo "warning: the code is at commit $commit, that run was at {commit}" >&2
"""
_DIRTY = 'echo "warning: that run had uncommitted changes, see $run/git.diff" >&2\n'
_ON_EACH_HOST = """\
if [ -z "${{MASTER_ADDR:-}}" ]; then
    echo "that run used {hosts} hosts; type this on each of them:" >&2
    echo "  MASTER_ADDR=<name of the first host> sh '$run/job.sh'" >&2
    exit 2
fi
"""


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Write `job.sh` to the folder of a run before it trains. A resume keeps the first one."""
    if run.folder is not None and not run.paths.job_file.exists():
        gpus = run.config.gpu_ids not in (-1, [-1])
        script = job_script(run.paths.root, PROJECT, run.folder.record, gpus, run.config.dist.launcher)
        with warn_on_oserror("job.sh"):
            write_text(run.paths.job_file, script)
            run.paths.job_file.chmod(run.paths.job_file.stat().st_mode | 0o111)
    yield


def job_script(run: Path, project: Path, attempt: dict[str, Any], gpus: bool = False, launcher: str = "auto") -> str:
    """Return a POSIX shell script that repeats the run as `<name>_replicate`, from any directory.

    Args:
        gpus: whether each process has a GPU.
        launcher: `dist.launcher` of the run: the script may use another one than that it names.
    """
    run = run.resolve()
    project = project.resolve()
    git = attempt["git"]
    hosts = math.ceil(attempt["world_size"] / attempt["processes_per_host"])
    lines = []
    for name, value in attempt["environment"].items():
        if re.fullmatch(r"[\w.,:+-]+", value):
            lines.append(f'export {name}="${{{name}:={value}}}"\n')
    if not is_copy(project):  # which is exactly what ran
        if git["commit"]:
            lines.append(_GIT_CHECK.format(commit=git["commit"]))
        if git["dirty"]:
            lines.append(_DIRTY)
    if hosts > 1 and attempt["launcher"] != "slurm":
        lines.append(_ON_EACH_HOST.format(hosts=hosts))
    where = shlex.quote(str(project))
    if run.is_relative_to(project) or is_copy(project):  # then both can be moved together
        where = f'"$run"/{shlex.quote(os.path.relpath(project, run))}'
    program = Path(attempt["argv"][0])
    script = program.name
    if program.is_relative_to(project):
        script = os.path.relpath(program, project)
    return _SCRIPT.format(
        shown=run.name,
        time=attempt["time"],
        project=where,
        python=shlex.quote(sys.executable),
        preparations="".join(lines),
        launch=_launch(attempt, hosts, gpus),
        script=shlex.quote(script),
        launcher="" if launcher in ("auto", "none") else " --dist.launcher auto",
        name=shlex.quote(f"{run.name}_replicate"),
        seed=attempt["seed"],
    )


def _launch(attempt: dict[str, Any], hosts: int, gpus: bool) -> str:
    """Return the command that starts the same number of processes on the same number of hosts."""
    count = attempt["processes_per_host"]
    if hosts > 1 and attempt["launcher"] == "slurm":
        flags = f"--nodes={hosts} --ntasks={attempt['world_size']} --ntasks-per-node={count}"
        if gpus:
            flags += f" --gpus-per-node={count}"
        return f'srun {flags} --kill-on-bad-exit=1 "$python"'
    if attempt["world_size"] == 1:
        return '"$python"'
    where = "--standalone"
    if hosts > 1:
        endpoint = '--rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"'
        where = f'--nnodes={hosts} --rdzv-backend=c10d --rdzv-id="$run" {endpoint}'
    return f'"$python" -m torch.distributed.run --nproc-per-node={count} {where}'
