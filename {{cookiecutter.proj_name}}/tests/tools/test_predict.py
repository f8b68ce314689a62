"""predict.py and its Python door: what is read, how it is prepared, what is written, and what is refused."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from common.base.errors import UserError
from common.task import Task
import predict
from predict import Predictor
from tests.conftest import PROJECT, Runs, load
from tests.samples import Convolution
from tools.predict import build_files, preparing_set

FOLDER = "type: ImageFolderDataset, folder: photos, size: [6, 10], channels: 1"
SCALED = "transforms: [{type: Normalize, mean: [0.4], std: [0.2]}]"


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


def picture(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (13, 17, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_a_trained_task_in_three_lines(run: Path) -> None:
    """P11: as the page shows it; for notebooks, sampling and embeddings."""
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    [text] = [text for text in blocks if "load_trained" in text]
    names: dict[str, Any] = {}
    exec(text.replace("experiments/default", str(run)), names)
    assert len(text.splitlines()) == 3
    images = torch.rand(4, 1, 6, 10)
    with torch.no_grad():
        first, second = names["task"].output({"image": images})["logits"], names["task"].model(images)
    assert first.shape == (4, 2) and torch.equal(first, second) and not names["task"].training


def expected(run: Path, path: Path) -> Tensor:
    """Return the probabilities of the two classes, computed by hand."""
    state = load(run, "best")
    model = Convolution(in_channels=1, classes=2, width=4).eval()
    model.load_state_dict(state["model"])
    small = Image.open(path).convert("L").resize((10, 6), Image.Resampling.BILINEAR)
    image = (torch.from_numpy(np.asarray(small, dtype=np.float32)) / 255 - 0.4) / 0.2
    with torch.no_grad():
        return model(image[None, None]).softmax(dim=1)[0]


def test_a_folder_is_predicted_as_the_run_would_see_it(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prepared as in validation, with class names; workers change nothing."""
    files = [
        picture(tmp_path / "in" / name, 100 + at) for at, name in enumerate(["a.png", "b.png", "c/d.jpg", "e.PNG"])
    ]
    for hidden in ("notes.txt", ".hidden.png"):
        (tmp_path / "in" / hidden).write_text("no picture")
    predictor = Predictor(run)
    rows = predictor([tmp_path / "in"])
    assert [row["file"] for row in rows] == [str(file) for file in files]
    split, section = preparing_set(predictor.trained)
    assert build_files(section, split, list(map(str, files)))[0]["name"] == "a.png"  # below its picture
    for row in rows:
        values = expected(run, Path(row["file"]))
        assert row["prediction"] == int(values.argmax())
        assert row["class"] == ("cat", "dog")[row["prediction"]]
        assert list(row["top"]) == sorted(("cat", "dog"), key=lambda name: -values[("cat", "dog").index(name)])
        assert row["top"]["dog"] == pytest.approx(float(values[1]), abs=1e-5)
    words = ["--model_pt", str(run / "checkpoints" / "best.pt"), "--input", str(tmp_path / "in")]
    assert predict.main([*words, "--num_workers", "1", "--pictures"]) == 0
    lines = (run / "predict" / "predictions.jsonl").read_text().splitlines()
    assert lines == capfd.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == rows
    drawn = sorted(path.name for path in (run / "predict" / "pictures").iterdir())
    assert drawn == [f"{at:06}_{file.stem}.png" for at, file in enumerate(files)]


def test_files_that_cannot_be_read(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All are named, the others are predicted, and the exit code says that it was not all."""
    for number in range(7):
        picture(tmp_path / "in" / f"{number}.png", number)
    broken = [tmp_path / "in" / f"{number}.png" for number in (1, 3, 4, 5)]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-30])
    words = ["--model_pt", str(run), "--input", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert predict.main(words) == 1
    shown = capfd.readouterr().err
    assert "4 of 7 files have no prediction: " in shown
    assert all(f"{path}: cannot read the image" in shown for path in broken)
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert [Path(json.loads(line)["file"]).name for line in lines] == ["0.png", "2.png", "6.png"]


class Numbers:
    """Three numbers and their sum; from a file, its three numbers."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.rows = torch.rand(64, 3).tolist()

    @classmethod
    def from_files(cls, files: Sequence[Any], **_: Any) -> Any:
        return [{"x": torch.tensor([float(word) for word in Path(file).read_text().split()])} for file in files]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self.rows[index]), "y": torch.tensor([sum(self.rows[index])])}


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).expand(-1, 100)


class SumTask(Task):
    """Any task: nothing here is written for predict.py."""

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        wide = self.model(batch["x"])
        return {"sum": wide[:, :1], "wide": wide}


class WideTask(SumTask):
    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"wide": self.model(batch["x"])}


def test_any_task_predicts(runs: Runs, tmp_path: Path) -> None:
    """The numbers of its output, without code; with too many of them, a sentence says what to write."""
    here, data = "tests.tools.test_predict", "{type: tests.tools.test_predict.Numbers}"
    words = ["--task", f"{{type: {here}.SumTask}}", "--model", f"{{type: {here}.Wide}}", "--metric", "{$REPLACE: true}"]
    words += ["--loss", "{$REPLACE: true, mse: {type: torch.nn.MSELoss, inputs: {input: output.sum, target: batch.y}}}"]
    words += [word for split in ("train", "val", "eval") for word in (f"--dataset.{split}", data)]
    folder = runs.train(*words)
    (tmp_path / "a.txt").write_text("1 2 3")
    (tmp_path / "b.txt").write_text("3 2 1")
    rows = list(Predictor(folder)([tmp_path / "a.txt", tmp_path / "b.txt"]))
    model = load(folder, "best")["model"]
    for row, numbers in zip(rows, ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]), strict=True):
        assert row.keys() == {"file", "sum"}
        assert row["sum"] == pytest.approx(float(model["weight"] @ torch.tensor(numbers) + model["bias"]))
    with pytest.raises(UserError, match=r"WideTask needs a method describe\(output, batch\)"):
        Predictor(folder, "--task", f"{{type: {here}.WideTask}}")([tmp_path / "a.txt"])


class Sums(Numbers):
    """Three numbers in a line of text."""

    lines = True
    suffixes = frozenset({".txt"})

    @classmethod
    def from_files(cls, files: Sequence[Any], **_: Any) -> Any:
        return Written(files)


class Written:
    """Lines that a person wrote: one without numbers is an error, of that line alone."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.texts[index].split()
        if wrong := [word for word in words if not word.isdigit()]:
            raise UserError(f"no numbers: {wrong[0]}")
        return {"x": torch.tensor([float(word) for word in words])}


def test_lines_of_text(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sample per line, of files and folders; each row has its place and its text."""
    here = "tests.tools.test_predict"
    words = ["--task", f"{{type: {here}.SumTask}}", "--model", f"{{type: {here}.Wide}}", "--metric", "{$REPLACE: true}"]
    words += ["--loss", "{$REPLACE: true, mse: {type: torch.nn.MSELoss, inputs: {input: output.sum, target: batch.y}}}"]
    folder = runs.train(*words, *(f"--dataset.{split}={{type: {here}.Sums}}" for split in ("train", "val", "eval")))
    lines = ["1 2 3", "", "1 2 pizza", "0 0 1"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    (tmp_path / "in" / "b.md").write_text("no text of ours")
    command = ["--model_pt", str(folder), "--num_workers", "1", "--input"]
    assert predict.main([*command, str(tmp_path / "in")]) == 1  # one line cannot be read
    rows = [json.loads(line) for line in (folder / "predict" / "predictions.jsonl").read_text().splitlines()]
    assert [(row["file"], row["text"]) for row in rows] == [(f"{tmp_path}/in/a.txt:{n}", lines[n - 1]) for n in (1, 4)]
    shown = capfd.readouterr()
    assert f"{tmp_path}/in/a.txt:3: no numbers: pizza" in shown.err and '"text": "1 2 3"' in shown.out
    for data, said in ((b"\xff\xfe", "a.txt is not text in UTF-8"), (b"\n", "nothing that .*Sums can read")):
        (tmp_path / "in" / "a.txt").write_bytes(data)
        with pytest.raises(UserError, match=said):
            predict.main([*command, str(tmp_path / "in")])
