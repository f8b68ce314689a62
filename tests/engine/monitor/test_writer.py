"""`metrics.jsonl` and TensorBoard: every digit, and every point once."""

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loguru import logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.monitor.writer import Recorder, WriterRun
from tests.conftest import run

BOARD = ["tensorboard"]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "event"))
    accumulator.Reload()
    return accumulator


def scalars(recorder: Recorder, event: str, step: int, values: dict[str, float]) -> None:
    recorder.record(event, step=step, values=values)
    recorder.write("scalars", event, step, values)


def test_metrics_keep_every_digit(tmp_path):
    """One JSON object a line, the run first, numbers to the last bit."""
    path = tmp_path / "metrics.jsonl"
    values = {"loss": 0.1 + 0.2, "tiny": 5e-324, "acc": float(np.float32(0.1))}
    writer = Recorder(path, WriterRun(tmp_path, id="digits_1"))
    scalars(writer, "train", 3, values)
    writer.record("checkpoint", step=3, files=["latest.pt"])
    lines = path.read_text().splitlines()  # before close: a killed process loses nothing
    writer.close()
    assert len(lines) == 3
    assert lines == [json.dumps(json.loads(line)) for line in lines]
    head, train, saved = lines_of(path)
    assert (head["event"], head["schema"], head["run"], head["attempt"]) == ("run", 1, "digits_1", 1)
    assert train == {"event": "train", "step": 3, "values": values}
    assert saved["files"] == ["latest.pt"]


def test_several_threads_write_each_line_once(tmp_path):
    """Checkpoints are saved, and recorded, beside the training that continues."""
    writer = Recorder(tmp_path / "metrics.jsonl", WriterRun(tmp_path, id="a"))

    def record(name: int) -> None:
        for step in range(500):
            writer.record("checkpoint", step=step, thread=name)

    threads = [threading.Thread(target=record, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    written = [(entry["thread"], entry["step"]) for entry in lines_of(tmp_path / "metrics.jsonl")[1:]]
    assert sorted(written) == [(name, step) for name in range(4) for step in range(500)]


def test_numbers_that_json_does_not_have(tmp_path):
    """The file stays valid JSON, with texts that `float` reads."""
    path = tmp_path / "metrics.jsonl"
    writer = Recorder(path, WriterRun(tmp_path, id="a"))
    scalars(writer, "train", 1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    writer.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(path.read_text().splitlines()[1], parse_constant=refuse)
    entry = lines_of(path)[1]
    assert entry["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert [float(value) for value in entry["values"].values()][1:] == [math.inf, -math.inf]


@pytest.mark.slow
def test_a_resume_leaves_no_point_twice(tmp_path):
    """In metrics and TensorBoard what came after the checkpoint goes; the rest stays."""
    path = tmp_path / "metrics.jsonl"
    writer = Recorder(path, WriterRun(tmp_path, id="a"), BOARD)
    for step in range(1, 8):
        scalars(writer, "train", step, {"loss": float(step)})
    writer.close()
    with path.open("a") as file:
        file.write('{"event": "train", "step": 8, "val')  # killed in the middle of a line
    time.sleep(1.1)  # TensorBoard orders files by the second in their names
    writer = Recorder(path, WriterRun(tmp_path, id="a", resume_step=4, attempt=2), BOARD)
    for step in range(5, 7):
        scalars(writer, "train", step, {"loss": float(-step)})
    writer.close()
    entries = lines_of(path)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, -5.0), (6, -6.0)]
    assert [(entry["step"], entry["values"]["loss"]) for entry in entries if entry["event"] == "train"] == expected
    assert [entry.get("attempt") for entry in entries if entry["event"] == "run"] == [1, 2]
    assert [(point.step, point.value) for point in events(tmp_path).Scalars("Train/loss")] == expected


def test_a_kill_while_the_metrics_are_cut_loses_nothing(tmp_path, monkeypatch):
    """The file is replaced in one move."""
    path = tmp_path / "metrics.jsonl"
    writer = Recorder(path, WriterRun(tmp_path, id="a"))
    scalars(writer, "train", 9, {"loss": 1.0})
    writer.close()
    before = path.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        Recorder(path, WriterRun(tmp_path, id="a", resume_step=0, attempt=2))
    assert path.read_text() == before


def test_flush_brings_tensorboard_to_the_disk(tmp_path):
    """What was measured before a checkpoint can be read while the run continues."""
    writer = Recorder(tmp_path / "m", WriterRun(tmp_path, id="a"), BOARD)
    scalars(writer, "val", 5, {"loss": 0.25})
    writer.write("image", 5, "val/00", np.full((4, 6, 3), (255, 0, 10), np.uint8))
    writer.flush()
    read = events(tmp_path)
    (image,) = read.Images("val/00")
    assert (image.step, image.height, image.width) == (5, 4, 6)
    assert [(point.step, point.value) for point in read.Scalars("Val/loss")] == [(5, 0.25)]
    writer.close()


def test_without_tensorboard_a_run_goes_on(tmp_path, monkeypatch):
    """It is reported once what is missing; metrics are written all the same."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    writer = Recorder(tmp_path / "metrics.jsonl", WriterRun(tmp_path, id="a"), BOARD)
    scalars(writer, "train", 1, {"loss": 1.0})
    scalars(writer, "train", 2, {"loss": 1.0})
    writer.close()
    logger.remove(number)
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 3
    assert len([line for line in lines if "writer tensorboard failed" in line]) == 1


FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
from common.monitor.writer import Recorder, WriterRun

def scalars(recorder, event, step, values):
    recorder.record(event, step=step, values=values)
    recorder.write("scalars", event, step, values)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
recorder = Recorder(folder / "metrics.jsonl", WriterRun(folder, id="a"), ["tensorboard"])
scalars(recorder, "train", 1, {"loss": 1.0})
recorder.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for step in range(2, 5):
    scalars(recorder, "train", step, {"loss": 1.0})
    recorder.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for step in range(5, 7):
    scalars(recorder, "train", step, {"loss": 1.0})
recorder.close()
"""


@pytest.mark.slow
def test_a_full_disk_is_reported_once(tmp_path):
    """With space again, all metrics are written; TensorBoard has what was written before."""
    done = run([sys.executable, "-c", FULL_DISK, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("writer tensorboard failed: OSError") == 1
    assert [entry["step"] for entry in lines_of(tmp_path / "metrics.jsonl")[1:]] == [1, 2, 3, 4, 5, 6]
    assert [point.step for point in events(tmp_path).Scalars("Train/loss")] == [1]


def test_closing_is_final_and_harmless(tmp_path):
    """An error after the end of a run is not hidden by one of the writer's."""
    writer = Recorder(tmp_path / "metrics.jsonl", WriterRun(tmp_path, id="a"), BOARD)
    for _ in range(2):
        writer.close()
        writer.record("end")
        scalars(writer, "train", 1, {"loss": 1.0})
        writer.write("image", 1, "a", np.zeros((2, 2, 3), np.uint8))
    assert [entry["event"] for entry in lines_of(tmp_path / "metrics.jsonl")] == ["run"]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
