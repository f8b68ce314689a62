"""Processes that cannot work together, since they are not alike: refused at the start, with what differs."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from common.distributed.group import code_of
from tests.conftest import ENVIRONMENT, PROJECT, Runs, copy_of_project
from tests.ranks import refused
from custom.datasets.digits_dataset import DigitsDataset


class Shorter(DigitsDataset):
    """On rank 1 the end is missing, as of a copy that broke off."""

    def __len__(self) -> int:
        return 100 if os.environ.get("RANK") == "1" else super().__len__()


def old_torch() -> None:
    if os.environ["RANK"] == "1":
        torch.__version__ = TorchVersion("2.9.0")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_data(runs: Runs, split: str) -> None:
    """Which rank sees how many samples of what; nothing of an earlier run is touched."""
    text = refused(runs, 2, runs.words(f"--dataset.{split}", "{type: engine.distributed.test_alike.Shorter}"))
    assert "rank 1 sees different data than rank 0" in text
    assert f"samples of dataset.{split}: 160 on rank 0, 100 on rank 1" in text
    assert not (runs.root / "run").exists()


@pytest.mark.slow
def test_torch(runs: Runs) -> None:
    """Two environments on two hosts."""
    text = refused(runs, 2, runs.words(), setup=old_torch)
    assert f"torch: '{torch.__version__}' on rank 0, '2.9.0' on rank 1" in text


@pytest.mark.slow
def test_code(runs: Runs) -> None:
    """Two copies of the project on two hosts, one of which was edited."""
    copy = copy_of_project(runs.root / "copy")
    with (copy / "custom" / "tasks" / "classification_task.py").open("a") as file:
        file.write("# edited\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    try:
        for number, project in enumerate((PROJECT, copy)):
            own = {"RANK": str(number), "LOCAL_RANK": str(number), "PYTHONPATH": ""}
            command = [sys.executable, "train.py", *runs.words()]
            environment = {**ENVIRONMENT, **shared, **own}
            ranks.append(subprocess.Popen(command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True))
        texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert 2 in [rank.returncode for rank in ranks] and 0 not in [rank.returncode for rank in ranks]
    text = "".join(texts)
    assert "rank 1 runs different code than rank 0" in text and "custom/tasks/classification_task.py: '" in text
    assert "common/build.py" not in text


def test_which_files_count(tmp_path: Path) -> None:
    """Code beside train.py and in packages; not what runs have copied, nor tests, nor what an editor leaves."""
    for name in ("train.py", "own/__init__.py", "own/a/b.py", "experiments/x/code/train.py", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "own" / ".#lock.py").symlink_to("nobody@nowhere")
    assert sorted(code_of(tmp_path)) == ["own/__init__.py", "own/a/b.py", "train.py"]
