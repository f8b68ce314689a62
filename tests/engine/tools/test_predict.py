"""predict.py and its Python door: what is read, how it is prepared, what is written, and what is refused."""

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from common.base.errors import UserError
import predict
from predict import Predictor
from tests.conftest import Runs
from tests.tools.test_predict import FOLDER, SCALED, picture
from tools.predict import describe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images in two folders. Its data are gone."""
    home = tmp_path_factory.mktemp("home")
    for label in ("cat", "dog"):
        for number in range(8):
            picture(home / "photos" / label / f"{number}.png", number)
    words = ["--dir.data_dir", str(home), "--model.classes", "2", "--optim.lr", "0.05"]
    words += [
        "--dataset.train",
        f"{{{FOLDER}, flip: true, {SCALED}}}",
        "--dataset.eval",
        "null",
        "--best.metric",
        "loss",
    ]
    folder = Runs(home).train(*words, "--dataset.val", f"{{{FOLDER}, eval_batch_size: 3, {SCALED}}}")
    shutil.rmtree(home / "photos")
    return folder


def test_nothing_is_overwritten(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A second prediction has a folder of its own, or is refused; a name may be as long as the system allows."""
    image = picture(tmp_path / f"{'猫' * 83}.png", 1)  # 253 bytes
    words = ["--model_pt", str(run), "--input", str(image), "--pictures"]
    earlier = {folder: (folder / "predictions.jsonl").read_bytes() for folder in run.glob("predict*")}
    assert predict.main(words) == predict.main(words) == 0
    assert "1 predicted by " in capfd.readouterr().err
    folders = sorted(run.glob("predict*"), key=lambda folder: (len(folder.name), folder.name))
    assert [folder.name for folder in folders][-1] == f"predict-{len(earlier) + 2}"
    assert all((folder / "predictions.jsonl").read_bytes() == text for folder, text in earlier.items())
    (drawn,) = (folders[-1] / "pictures").iterdir()
    assert drawn.name.startswith("000000_猫猫") and drawn.stat().st_size > 100
    with pytest.raises(UserError, match=r"--out .* has predictions.jsonl already; name another folder"):
        predict.main([*words, "--out", str(folders[-1])])


def test_what_cannot_be_predicted(run: Path, tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png", 0)
    with pytest.raises(UserError, match=r"no file or folder .*nothing"):
        Predictor(run)([image, tmp_path / "nothing"])
    with pytest.raises(UserError, match=r"there is no checkpoint"):
        Predictor(tmp_path)
    with pytest.raises(UserError, match=r"model\.widht = 3"):
        Predictor(run, "--model.widht", "3")
    other = Predictor(run, "--dataset.val", "{type: engine.tools.test_predict.Unreadable}")
    with pytest.raises(UserError, match=r"test_predict.Unreadable cannot read single files; .* from_files"):
        other([image])


class Unreadable:
    """A dataset without `from_files`."""

    def __init__(self, data_dir: Path, mode: str) -> None: ...


def test_a_tensor_of_another_length_describes_no_sample() -> None:
    output = {"logits": torch.arange(12.0).reshape(4, 3), "anchors": torch.ones(2, 2)}
    assert describe(nn.Identity(), output, {})[1] == {"logits": [3.0, 4.0, 5.0]}


def test_a_refusal_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 1)
    words = ["--dataset.eval", "{$REPLACE: true, type: tests.data.test_data.Noisy}", "--input", str(tmp_path / "a.png")]
    with pytest.raises(UserError, match="cannot read single files"):
        predict.main(["--model_pt", str(run), *words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_no_text(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal that refuses what it cannot write."""
    image = tmp_path / os.fsdecode(b"ros\xe9.png")
    picture(image, 1)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "utf-8", errors="strict", write_through=True))
    assert predict.main(["--model_pt", str(run), "--input", str(image), "--out", str(tmp_path / "out")]) == 0
    assert written.getvalue() == (tmp_path / "out" / "predictions.jsonl").read_bytes()


def test_the_prediction_is_the_task_s_own() -> None:
    """Not the likeliest class; one that is no class has no probability."""
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])
    output = {"probabilities": probabilities, "prediction": torch.tensor([1, -1])}
    task: Any = nn.Identity()
    task.classes = ("cat", "dog")
    first, second = describe(task, output, {})
    assert (first["prediction"], first["class"], first["probability"]) == (1, "dog", 0.2)
    assert (second["prediction"], second["class"], second["probability"]) == (-1, "-1", None)
    assert next(iter(first["top"].items())) == ("cat", 0.7) and second["top"]["2"] == 0.7


def test_pictures_of_different_sizes(run: Path, tmp_path: Path) -> None:
    """No batch can be made of them: said as in training."""
    files = [picture(tmp_path / "a.png", 0)]
    with Image.open(files[0]) as image:
        image.resize((9, 12)).save(tmp_path / "b.png")
    words = ["--dataset.eval", "{type: ImageFiles, size: null, channels: 1, eval_batch_size: 2}"]
    with pytest.raises(UserError, match="no batch can be made of"):
        Predictor(run, *words)([*files, tmp_path / "b.png"])
