"""What the log of a resume claims: only what was compared, each change with its weight, and what cannot be known."""

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from common.checkpoint.folder import CheckpointFolder
from common.checkpoint.resume import changes
from common.run import record
from tests.conftest import Runs, load
from custom.models.conv_model import ConvModel

COUNTED = r"code \(\d+ files\), config, \d+ packages, machine, data \(\d+ of \d+ samples read again: the same\)"
ALONE = (
    r", if your code, and what it imports, restores its state and depends on nothing else \(other files, variables\)"
)


def guarantee(folder: Path) -> str:
    """Return the line of the log that says how exact the last resume was, without what it says of the new length."""
    claims = re.findall(r"(this resume .*)\n", (folder / "train.log").read_text())
    return re.sub(r"[;,] (not compared: )?whether a fresh run with this .*", "", claims[-1])


def resumed(runs: Runs, *words: str) -> str:
    """Resume the run for an epoch more."""
    return guarantee(runs.train("--resume", "auto", "--progress.epoch", "2", *words))


def photos(root: Path, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    for number in range(40):
        file = root / "photos" / "ab"[number % 2] / f"{number}.bmp"  # its size does not depend on its contents
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (8, 8), dtype=np.uint8)).save(file)
    return root


def retouched(root: Path) -> None:
    for file in root.rglob("*.bmp"):
        os.utime(file, (1, 1))


def fewer(root: Path) -> None:
    next(root.rglob("*.bmp")).unlink()


def moved(root: Path) -> None:
    shutil.move(root / "photos", root / "elsewhere")
    (root / "photos").symlink_to(root / "elsewhere")


def enlarged(root: Path) -> None:
    for file in root.rglob("*.bmp"):
        Image.new("L", (16, 16)).save(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (enlarged, r"not guaranteed .*: sample \d+ of dataset.train: `image` differs \(\d+ of \d+ "),
        (retouched, rf"bit-exact as far as compared: {COUNTED}{ALONE}$"),
        pytest.param(
            lambda root: photos(root, 1),
            r"not guaranteed .*: sample \d+ of dataset.train: `image` dif",
            marks=pytest.mark.slow,
        ),
        (fewer, r"not guaranteed to be bit-exact or sample-exact: .*dataset.train: 40 samples -> 39"),
        pytest.param(moved, rf"bit-exact as far as compared: {COUNTED}{ALONE}$", marks=pytest.mark.slow),
    ],
    ids=["other images", "copied images", "noise of the same size", "fewer", "in another folder"],
)
def test_images_replaced_between_stop_and_resume(runs: Runs, change: Callable[[Path], Any], said: str) -> None:
    """What a copy changes too, times and the folder, is not called another dataset."""
    part = "{type: ImageFolderDataset, folder: photos, size: [8, 8], channels: 1}"
    data = ["--dir.data_dir", str(photos(runs.root / "data")), "--dataset.train", part, "--dataset.eval", "null"]
    words = [*data, "--dataset.val", f"{{$REPLACE: true, {part[1:]}", "--model.classes", "2"]
    runs.train(*words, "--progress.epoch", "1")
    change(runs.root / "data")
    assert re.search(f"this resume is {said}", resumed(runs, *words))


def test_unchanged(runs: Runs) -> None:
    """The sentence counts what was compared; run.json has packages and machine too."""
    folder = runs.train("--progress.epoch", "1")
    assert re.fullmatch(rf"this resume is bit-exact as far as compared: {COUNTED}{ALONE}", resumed(runs))
    attempt = json.loads((folder / "run.json").read_text())["attempts"][0]
    assert attempt["packages"]["torch"] == torch.__version__
    assert attempt["packages"].keys() >= {"numpy", "PIL", "yaml"}
    assert {"python", "cpu", "threads", "tf32", "deterministic"} <= attempt["machine"].keys()
    assert load(folder)["fingerprint"].items() >= attempt["machine"].items()


@pytest.mark.slow
def test_with_and_without_the_check_of_data(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume says that no data were compared, and why, also where only one of the two projects has the part."""
    folder = runs.train("--progress.epoch", "1")
    with monkeypatch.context() as without:
        without.setattr("common.checkpoint.resume.part", lambda name, module: None)
        for epochs in ("2", "3"):
            said = guarantee(runs.train("--resume", "auto", "--progress.epoch", epochs))
            assert "data (" not in said.partition("not compared: ")[0]
            assert "; not compared: the data (needs parts/data_check, which this project does not have: make " in said
    assert load(folder)["fingerprint"]["data"] == {}
    said = guarantee(runs.train("--resume", "auto", "--progress.epoch", "4"))
    assert said.endswith("; not compared: the data, of which the checkpoint has no checksums")


def test_another_version_of_a_package(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named; whether it computes anything is not guessed. A module with another name than its package, too."""
    runs.train("--progress.epoch", "1")
    installed = tmp_path / "site" / "loguru-99.0.dist-info" / "METADATA"
    installed.parent.mkdir(parents=True)
    installed.write_text("Metadata-Version: 2.1\nName: loguru\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(record, "_version", inspect.unwrap(record._version))  # without the cache
    monkeypatch.setattr("PIL.__version__", "98.0")
    said = r"sample-exact, not bit-exact \(PIL [\d.]+ -> 98.0; loguru [\d.]+ -> 99.0\), as far as"
    assert re.match(f"this resume is {said}", resumed(runs))


def test_other_data_and_another_package(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that differ are no lesser difference because a package differs as well."""
    part = "{type: ImageFolderDataset, folder: photos, size: [8, 8], channels: 1}"
    data = ["--dir.data_dir", str(photos(runs.root / "data")), "--dataset.train", part, "--dataset.eval", "null"]
    words = [*data, "--dataset.val", f"{{$REPLACE: true, {part[1:]}", "--model.classes", "2"]
    runs.train(*words, "--progress.epoch", "1")
    enlarged(runs.root / "data")
    monkeypatch.setattr("PIL.__version__", "98.0")
    said = r"not guaranteed .*: sample \d+ of dataset.train: .*; PIL [\d.]+ -> 98.0"
    assert re.match(f"this resume is {said}", resumed(runs, *words))


def test_a_nan_in_the_config_is_no_change() -> None:
    """Though NaN differs from itself; nor for processes that compare theirs."""
    one, other = ({"fill": float("nan"), "sizes": [float("nan"), 1]} for _ in range(2))
    assert list(changes(one, other)) == []
    assert [change.key for change in changes(one, {**other, "fill": 0.0})] == ["fill"]


def test_a_resume_that_is_not_exact_warns(runs: Runs) -> None:
    """A change that was allowed is said where warnings are looked for."""
    folder = runs.train("--progress.epoch", "1")
    runs.train("--resume", "auto", "--progress.epoch", "2", "--optim.lr", "0.5", "--allow_changes", "true")
    assert re.search(
        r"WARNING +\S+ +changed since then:(.|\n)*this resume is not guaranteed", (folder / "train.log").read_text()
    )


def test_a_package_that_is_gone(runs: Runs) -> None:
    folder = runs.train("--progress.epoch", "1")
    state = load(folder)
    state["fingerprint"]["packages"]["no_such_module"] = "1.0"
    CheckpointFolder(folder / "checkpoints").save(state)
    assert "not bit-exact (no_such_module 1.0 -> None)" in resumed(runs)


class Endless(torch.utils.data.IterableDataset[Any]):
    """A stream that cannot restore its place."""

    def __init__(self, data_dir: Path, mode: str) -> None: ...

    def __iter__(self) -> Any:
        return ({"image": torch.rand(1, 8, 8), "label": torch.tensor(n % 10)} for n in range(64))


def test_a_stream(runs: Runs) -> None:
    """At the start of an epoch, where nothing is read again, it is not called inexact, and its data not compared."""
    words = ["--dataset.train", "{type: engine.checkpoint.test_guarantee.Endless}"]
    runs.train("--progress.epoch", "1", *words)
    message = resumed(runs, *words)
    assert message.startswith("this resume is bit-exact as far as compared: ")
    assert "; not compared: dataset.train: a stream, whose records cannot be read twice" in message


class Attributes(ConvModel):
    """Training changes `center`. `seen`, which it makes, is a cache; a hook computes `normed.weight`."""

    def __init__(self) -> None:
        super().__init__(width=4)
        self.center = torch.zeros(())
        self.size = torch.ones(())
        self.edges = torch.eye(3).to_sparse()
        self.normed = nn.utils.spectral_norm(nn.Linear(2, 2))

    def forward(self, image: Tensor) -> Tensor:
        self.seen = image
        if self.training:
            self.center = self.center + self.size
            self.normed(torch.ones(2))
        return super().forward(image)


def test_an_attribute_that_is_a_tensor(runs: Runs) -> None:
    """Named by a resume, which is not called bit-exact."""
    words = ["--model", f"{{$REPLACE: true, type: {__name__}.Attributes}}"]
    runs.train(*words)
    expected = "sample-exact, not bit-exact (training changed center, and the checkpoint does not hold it)"
    assert expected in resumed(runs, *words)
