"""TensorBoard in a real browser; the real MLflow and Weights & Biases, read back."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from real import REPORT, need
from support import HERE, Render, python_with

pytestmark = pytest.mark.slow

SHORT = [
    "--config", "configs/default.yaml", "--model.width", "4", "--progress.epoch", "2", "--progress.epoch_eval", "1",
    "--progress.log_every", "5", "--metric.ConfusionMatrix", "{}",
]  # fmt: skip
# Reads an offline run of Weights & Biases: records in blocks of 32 KiB, as in a log of LevelDB, after seven bytes.
READ_WANDB = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

data, at, whole, rows, config, codes = open(sys.argv[1], "rb").read(), 7, b"", [], {}, []
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    whole, at = (whole if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):
        record = Record.FromString(whole)
        if record.HasField("history"):
            rows.append({"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
        if record.HasField("run"):
            config |= {item.key: item.value_json for item in record.run.config.update}
            name = [record.run.run_id, record.run.display_name, record.run.project]
        if record.HasField("exit"):
            codes.append(record.exit.exit_code)
print("READ", json.dumps([name, config, rows, codes]))
"""
READ_MLFLOW = """
import json, sys
import mlflow

client = mlflow.MlflowClient(sys.argv[1])
group = client.get_experiment_by_name("runs")
(run,) = client.search_runs([group.experiment_id])
points = {
    key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
    for key in run.data.metrics
}
files = [file.path for path in ("images", "run") for file in client.list_artifacts(run.info.run_id, path)]
print("READ", json.dumps([run.info.run_name, run.info.status, run.data.params, points, files]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the trackers, and all that this one has."""
    return python_with(HERE / "trackers.txt", tmp_path_factory)


def call(root: Path, python: Path, *words: str) -> str:
    """Run a program in the project to its end; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [str(python), *words], cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def read(root: Path, python: Path, program: str, place: str) -> Any:
    (line,) = re.findall(r"^READ (.*)$", call(root, python, "-c", program, place), re.MULTILINE)
    return json.loads(line)


def recorded(folder: Path, event: str) -> list[tuple[int, float]]:
    """Return the steps and losses in metrics.jsonl."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(entry["step"], entry["values"]["loss"]) for entry in entries if entry["event"] == event]


@pytest.mark.full
def test_mlflow_on_the_disk(render: Render, python: Path, tmp_path: Path) -> None:
    """One run of MLflow with its parameters, curves, pictures and texts; a resume continues it, each point once."""
    root, folder = render(), tmp_path / "runs" / "digits"
    words = [*SHORT, "--name", "digits", "--dir.runs_dir", str(folder.parent), "--monitor.writers", "[mlflow]"]
    said = call(root, python, "train.py", *words, "--progress.max_steps", "25")
    said += call(root, python, "train.py", *words, "--resume", str(folder / "checkpoints" / "best.pt"))
    assert "cannot be written" not in said
    assert (folder / "checkpoints" / "best.pt").is_file()
    name, status, params, points, files = read(root, python, READ_MLFLOW, f"sqlite:///{folder.parent / 'mlflow.db'}")
    assert (name, status, params["model.width"], params["optim.lr"]) == ("digits", "FINISHED", "4", "0.001")
    for event in ("train", "val", "eval"):
        assert set(map(tuple, points[f"{event}/loss"])) >= set(recorded(folder, event))
        steps = [step for step, _ in points[f"{event}/loss"]]
        assert len(steps) == len(set(steps))
        assert steps[-1] == 38
    assert {"speed/memory_bytes", "train/lr", "val/Accuracy"} <= points.keys()
    assert "train/CrossEntropyLoss" not in points
    assert {"run/config.txt", "run/environment.txt", "run/model.txt"} <= set(files)
    assert any(file.endswith(".png") for file in files)
    REPORT.append("MLflow on a database, read back with its client")


def test_weights_and_biases_offline(render: Render, python: Path, tmp_path: Path) -> None:
    """Its offline run has the config, one row per step, and the pictures."""
    root, folder = render(), tmp_path / "runs" / "digits"
    writers = "[{type: wandb, mode: offline}]"
    words = [*SHORT, "--name", "digits", "--dir.runs_dir", str(folder.parent), "--monitor.writers", writers]
    said = call(root, python, "train.py", *words)
    assert "cannot be written" not in said
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    (run, name, project), config, rows, codes = read(root, python, READ_WANDB, str(file))
    assert run.startswith("digits_2")
    assert (name, project, codes) == ("digits", "runs", [0])
    assert json.loads(config["model"])["width"] == 4
    for event in ("train", "val", "eval"):
        found = [(int(row["_step"]), float(row[f"{event}/loss"])) for row in rows if f"{event}/loss" in row]
        assert found == recorded(folder, event)
    assert any(key.startswith("view/val") for row in rows for key in row)
    assert len(list(file.parent.glob("files/media/images/view/*.png"))) >= 4
    REPORT.append("Weights & Biases offline, its file read back")


@pytest.fixture
def board(render: Render, tmp_path: Path) -> Iterator[str]:
    """The address of a TensorBoard on the folder of two short runs."""
    root = render()
    for name, rate in (("slow", "1e-3"), ("fast", "1e-2")):
        words = [*SHORT, "--name", name, "--dir.runs_dir", str(tmp_path / "runs"), "--optim.lr", rate]
        call(root, Path(sys.executable), "train.py", *words)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "runs"), "--port", str(port)]
    process = subprocess.Popen([*command, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        tags = ""
        while not all(name in tags for name in ("fast", "slow", "view/eval")):
            assert time.monotonic() < end, f"TensorBoard knows only {tags}"
            time.sleep(0.3)
            with suppress(OSError):
                tags = get(address, "/data/plugin/images/tags")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def page(address: str, tmp_path: Path, name: str) -> str:
    """Return the page that Chromium shows at `address`, as HTML, when its scripts have run."""
    flags = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader",
        "--window-size=1500,2500", "--virtual-time-budget=20000", f"--user-data-dir={tmp_path / name}",
    ]  # fmt: skip
    done = subprocess.run(
        ["chromium", *flags, "--dump-dom", address], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_tensorboard_in_a_browser(board: str, tmp_path: Path) -> None:
    """The first page shows the curves of training and validation, by the names of the runs; pictures come last."""
    need({"chromium": ["chromium"]})
    first = page(board, tmp_path, "first")
    cards = re.findall(r'<(scalar|image|histogram)-card |title="([^" ]+/[^" ]+)"', first)
    assert {kind for kind, _ in cards} <= {"scalar", ""}
    assert [tag for _, tag in cards if tag] == [
        "Train/grad_norm", "Train/loss", "Train/lr", "Val/Accuracy", "Val/ConfusionMatrix.balanced_accuracy",
        "Val/ConfusionMatrix.macro_f1", "Val/loss",
    ]  # fmt: skip
    groups = re.findall(r'class="group-title[^>]*>\s*(?:<[^>]*>\s*)*([\w ]+?)\s*<', first)
    assert groups == ["Pinned", "Train", "Val", "best", "eval", "speed", "view"]
    assert sorted(json.loads(get(board, "/data/runs"))) == ["fast/event", "slow/event"]
    texts = json.loads(get(board, "/data/plugin/text/tags"))
    assert texts["fast/event"] == [f"run/{name}/text_summary" for name in ("config", "environment", "model")]
    REPORT.append("TensorBoard in Chromium")


def test_the_writer_of_the_page(render: Render, tmp_path: Path) -> None:
    """docs/monitor.md: a class of four methods, named by its import path."""
    root = render()
    page = (root / "docs" / "monitor.md").read_text()
    (text,) = re.findall(r"^```python\n(# custom/writers/note_writer\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "note_writer.py").write_text(text)
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']; import train; train.main(sys.argv[1:])"
    writers = "[{type: note_writer.NoteWriter, file: mine.txt}]"
    words = [*SHORT, "--name", "noted", "--dir.runs_dir", str(tmp_path), "--monitor.writers", writers]
    call(root, Path(sys.executable), "-c", program, *words)
    assert [line.split()[0] for line in (tmp_path / "noted" / "mine.txt").read_text().splitlines()] == ["19", "38"]
