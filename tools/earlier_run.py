"""Trains a small run with the template as it was at a commit, and keeps it for tests/test_earlier_runs.py.

    python tools/earlier_run.py COMMIT ...

Each becomes tests/earlier_runs/COMMIT: a run of two epochs, and `continued.jsonl`, the values that its own `--resume`
measured in a third one. Run it for the commit of each release.
"""

import io
import os
import platform
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from cookiecutter.main import cookiecutter

REPO = Path(__file__).resolve().parent.parent
KEPT = ("config.yaml", "run.json", "status.json", "job.sh", "metrics.jsonl")
TRAIN = [
    "--config", "configs/default.yaml", "--name", "old", "--gpu_ids", "-1", "--model.width", "4", "--optim.lr", "0.01",
    "--optim.accumulate", "2", "--optim.ema.decay", "0.9", "--progress.epoch", "2", "--progress.iter_loss", "5",
    "--progress.save_progress_val", "false",
]  # fmt: skip
RUN = Path("experiments/old")


def main(commits: list[str]) -> None:
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            keep(Path(folder), REPO / "tests" / "earlier_runs" / commit, commit)


def keep(folder: Path, target: Path, commit: str) -> None:
    """Render, train and continue in `folder`; write the run to `target`, without traces of this machine."""
    packed = subprocess.run(["git", "archive", commit], cwd=REPO, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder / "template", filter="data")
    answers = {"no_input": True, "default_config": True, "output_dir": str(folder)}
    project = Path(cookiecutter(str(folder / "template"), extra_context={"proj_name": "project"}, **answers))
    call(project, "train.py", *TRAIN)
    shutil.rmtree(target, ignore_errors=True)
    (target / "checkpoints").mkdir(parents=True)
    for name in KEPT:
        if (file := project / RUN / name).is_file():
            (target / name).write_text(cleaned(file.read_text(), project))
    for name in ("best.pt", "latest.pt"):
        shutil.copy(project / RUN / "checkpoints" / name, target / "checkpoints")
    call(project, "train.py", "--resume", str(RUN), "--progress.epoch", "3")
    lines = (project / RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target / "continued.jsonl").write_text("".join(lines[len((target / "metrics.jsonl").read_text().splitlines()) :]))


def call(project: Path, *words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words}\n{done.stdout}\n{done.stderr}")


def cleaned(text: str, project: Path) -> str:
    """`text` without paths, host and process numbers of this machine."""
    host, system = f'"{socket.gethostname()}"', platform.platform()
    for own, neutral in ((str(project), "/project"), (sys.executable, "python"), (host, '"host"'), (system, "Linux")):
        text = text.replace(own, neutral)
    return text


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
