"""A file of the project that needs a package which is not installed stops only the configs that use it."""

import sys
from pathlib import Path

import pytest

from common.config.registry import DATASET_REGISTRY, file_of
from tests.conftest import ENVIRONMENT, copy_of_project, run

VIDEO = """\
import no_such_package

from common.config.registry import DATASET_REGISTRY, file_of


@DATASET_REGISTRY.register()
class VideoDataset: ...
"""
SMALL = ["--progress.max_steps", "1", "--progress.epoch_val", "-1", "--progress.epoch_eval", "-1", "--batch_size", "8"]


@pytest.mark.slow
def test_only_what_needs_the_package_stops(tmp_path: Path) -> None:
    """D14: one line in the log; the file is named where its class is not found; other mistakes stop every run."""
    project = copy_of_project(tmp_path / "project")
    folder = project / Path(file_of(DATASET_REGISTRY.get("DigitsDataset")).split(":")[0]).parent
    (folder / "video_dataset.py").write_text(VIDEO)
    line = f"{folder.relative_to(project)}/video_dataset.py:1 needs no_such_package, which is not installed"

    def started(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "train.py", "--config", "configs/default.yaml", *SMALL, *words]
        done = run(command, cwd=project, env={**ENVIRONMENT, "PYTHONPATH": ""})
        return done.returncode, " ".join(done.stderr.split()), done.stdout

    code, said, _ = started("--dist.processes", "2")
    assert code == 0, said
    assert said.count(line) == 1
    assert (project / "experiments" / "default" / "train.log").read_text().count(line) == 1
    code, said, _ = started("--dataset.train.type", "VideoDataset", "--num_workers", "-1")
    assert code == 2 and "2 problems" in said and "there is no dataset called VideoDataset" in said and line in said
    code, said, listing = started("--list", "dataset")
    assert code == 0 and "DigitsDataset" in listing and line in listing
    (folder / "video_dataset.py").write_text("def f(:\n")
    code, said, _ = started()
    assert code == 2 and "video_dataset.py:1) cannot be imported: SyntaxError" in said
