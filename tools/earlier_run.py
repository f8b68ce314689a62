"""Trains a small run with the template as it was at a commit, and keeps both for the tests of later versions.

    python tools/earlier_run.py COMMIT [NAME]

Below tests/template, the run becomes earlier_runs/NAME, by default COMMIT: two epochs, and `continued.jsonl`, the
values that its own `--resume` measured in a third one. The template becomes earlier_templates/NAME.tar.xz, from which
projects are updated: a clone in CI may have no history. `make release` calls it.
"""

import io
import lzma
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
    "--optim.accumulate", "2", "--optim.ema.decay", "0.9", "--progress.epoch", "2", "--progress.log_every", "5",
]  # fmt: skip
RUN = Path("experiments/old")


TEMPLATE = ("{{cookiecutter.proj_name}}", "hooks", "cookiecutter.json", "copier.yml")


def main(commit: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        packed = template_at(commit)
        keep(Path(folder), REPO / "tests" / "template" / "earlier_runs" / name, packed)
        archive = REPO / "tests" / "template" / "earlier_templates" / f"{name}.tar.xz"
        archive.parent.mkdir(exist_ok=True)
        archive.write_bytes(lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME))


def template_at(commit: str) -> bytes:
    """Pack what a project is rendered from, as it was at a commit."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=REPO, check=True, capture_output=True).stdout

    there = git("ls-tree", "--name-only", commit).decode().splitlines()
    return git("archive", commit, *(name for name in TEMPLATE if name in there))


def keep(folder: Path, target: Path, packed: bytes) -> None:
    """Render, train and continue in `folder`; write the run to `target`, without traces of this machine."""
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
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[-1])
