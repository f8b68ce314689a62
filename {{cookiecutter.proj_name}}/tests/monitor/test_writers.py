"""`monitor.writers`: where curves and pictures go."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from common.config import ConfigError
from common.monitor.writer import Writer, WriterRun
from tests.conftest import Runs, metrics

HERE = "tests.monitor.test_writers"


class Diary(Writer):
    """Writes a line for each call."""

    def __init__(self, run: WriterRun, title: str) -> None:
        self.file = (run.folder / "diary.txt").open("a")
        self.file.write(f"{title} {run.name} {run.config['model']['width']} {run.resume_step}\n")

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        self.file.write(f"{event} {step} {' '.join(values)}\n")

    def images(self, step: int, tag: str, images: Sequence[NDArray[np.uint8]]) -> None:
        self.file.write(f"{tag} {step} {len(images)}\n")

    def text(self, step: int, tag: str, text: str) -> None:
        self.file.write(f"{tag} {step} {text.count('30,762') + text.count('width: 4') + text.count('train.py')}\n")

    def close(self, state: str) -> None:
        self.file.write(state)
        self.file.close()


class Broken(Diary):
    """A service that is down."""

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no route to host")


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    with (folder / "csv" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_and_a_class_of_the_users(runs: Runs) -> None:
    """By name and by import path; a resume leaves each step once, with every digit."""
    writers = f"[csv, {{type: {HERE}.Diary, title: dear}}]"
    folder = runs.train("--monitor.writers", writers, "--progress.max_steps", "6", "--progress.epoch_val", "4step")
    (folder / "csv" / "train.csv").open("a").write("8,0.1\n9,")  # later steps, and a line that a kill has cut
    runs.train("--monitor.writers", writers, "--progress.max_steps", "8", "--resume", "auto")
    for event in ("train", "val", "speed"):
        assert [int(row["step"]) for row in rows(folder, event)] == [each["step"] for each in metrics(folder, event)]
    for row, entry in zip(rows(folder, "val"), metrics(folder, "val"), strict=True):
        assert float(row["loss"]) == entry["values"]["loss"] and float(row["Accuracy"]) == entry["values"]["Accuracy"]
    # The only part of the loss would be the same curve; memory is in GB.
    assert list(rows(folder, "train")[0]) == ["step", "loss"]
    speed = metrics(folder, "speed")[0]["values"]
    assert float(rows(folder, "speed")[0]["memory_GB"]) == pytest.approx(speed["memory_bytes"] / 1e9, rel=1e-12)
    diary = (folder / "diary.txt").read_text()
    assert diary.startswith("dear run 4 None\nrun/config 0 1\nrun/environment 0 1\nrun/model 0 ")
    for line in ("train 2 loss", "lr 2 lr", "val 4 loss Accuracy", "view/val 4 5", "finisheddear run 4 6"):
        assert f"\n{line}\n" in f"\n{diary}".replace("finisheddear", "\nfinisheddear")
    assert diary.endswith("finished")


def test_new_columns_join_a_table(tmp_path: Path) -> None:
    """As when a stage of the run has another loss."""
    from custom.writers.csv_writer import CsvWriter

    writer = CsvWriter(WriterRun(tmp_path))
    writer.scalars("train", 1, {"loss": 0.1 + 0.2})
    writer.scalars("train", 2, {"loss": 0.5, "aux, 2": 1e-300})
    assert rows(tmp_path, "train") == [
        {"step": "1", "loss": "0.30000000000000004", "aux, 2": ""},
        {"step": "2", "loss": "0.5", "aux, 2": "1e-300"},
    ]


def test_a_writer_that_fails_does_not_end_the_training(runs: Runs) -> None:
    """One warning, and the others go on; it is tried again at each save, but not for ever."""
    writers = f"[{{type: {HERE}.Broken, title: x}}, csv]"
    folder = runs.train("--monitor.writers", writers, "--progress.epoch", "5")
    log = (folder / "train.log").read_text()
    assert log.count("no route to host") == 1
    assert f"{HERE}.Broken cannot be written: ConnectionError: no route to host; metrics.jsonl will have" in log
    assert len(rows(folder, "val")) == 5
    diary = (folder / "diary.txt").read_text()
    assert (diary.count("x run 4 None"), diary.count("run/config")) == (3, 1)


def test_mistakes_in_the_list_of_writers(runs: Runs) -> None:
    """All at once, before anything starts."""
    with pytest.raises(ConfigError) as found:
        runs.train("--monitor.writers", f"[tensorbord, {{type: csv, foldr: x}}, {{type: {HERE}.Diary}}, mlflow]")
    said = str(found.value)
    for part in (
        "monitor.writers[0]", "did you mean tensorboard?", "monitor.writers[1].foldr", "did you mean folder?",
        "monitor.writers[2].title", "needs the package mlflow, which is not installed; pip install mlflow",
    ):  # fmt: skip
        assert part in said, said
    with pytest.raises(ConfigError, match=r"name it in monitor.writers: \[tensorboard\]"):
        runs.train("--monitor.tensorboard", "true")


def test_what_tensorboard_shows(runs: Runs) -> None:
    """Groups of curves, pictures in one of their own that comes last, texts, settings and histograms."""
    folder = runs.train(
        "--monitor.writers", "[tensorboard]", "--monitor.histograms", "3step", "--progress.max_steps", "6",
        "--progress.epoch_eval", "1", "--progress.iter_save_progress", "4", "--optim.groups", "[{match: head.*}]",
        "--metric.ConfusionMatrix", "{}", "--metric.MeanAveragePrecision", "{}",
    )  # fmt: skip
    board = EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload()
    found = board.Tags()
    scalars = ["loss", "Accuracy", "ConfusionMatrix.balanced_accuracy", "ConfusionMatrix.macro_f1"]
    measured = {f"{split}/{name}" for split in ("Val", "eval") for name in [*scalars, "MeanAveragePrecision"]}
    speed = {"speed/step_seconds", "speed/data_share", "speed/samples_per_second", "speed/memory_GB"}
    assert set(found["scalars"]) == {"Train/loss", *measured, *speed, "lr/head", "lr/rest"}
    figures = {
        f"view/{split}/{name}" for split in ("val", "eval") for name in ("ConfusionMatrix", "MeanAveragePrecision")
    }
    assert set(found["images"]) == {"view/train", "view/val", "view/eval", *figures}
    assert [each.step for each in board.Histograms("weights/head.2.weight")] == [4, 6]
    assert "weights/head.2.weight.grad" in found["histograms"]
    assert {f"run/{name}/text_summary" for name in ("config", "environment", "model")} <= set(found["tensors"])
    about = board.summary_metadata
    assert set(about) >= {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    started = HParamsPluginData.FromString(about["_hparams_/session_start_info"].plugin_data.content)
    settings = started.session_start_info.hparams
    assert settings["optim.lr"].number_value and not any(key.startswith("dir.") for key in settings)
    left = folder / "eval" / "epoch_000001"
    assert {f"{name}.png" for name in ("ConfusionMatrix", "MeanAveragePrecision", "00", "09")} <= {
        path.name for path in left.iterdir()
    }


def test_a_run_with_an_event_folder_continues_in_it(runs: Runs) -> None:
    """As runs of earlier versions have it: otherwise one curve would be two."""
    folder = runs.train("--monitor.writers", "[tensorboard]", "--progress.max_steps", "2")
    (folder / "event").mkdir()
    for file in folder.glob("events.*"):
        file.rename(folder / "event" / file.name)
    runs.train("--monitor.writers", "[tensorboard]", "--progress.max_steps", "4", "--resume", "auto")
    assert not list(folder.glob("events.*"))
    points = EventAccumulator(str(folder / "event")).Reload().Scalars("Train/loss")
    assert [point.step for point in points] == [2, 4]
