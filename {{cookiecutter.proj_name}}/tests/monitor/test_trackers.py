"""The ready-made writers: MLflow, Weights & Biases."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.base.parts import installed
from tests.conftest import Runs, metrics


class Tracker:
    """Both trackers as far as the writers use them: of each of their runs what it was given, by the run's id."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def of(self, run: str) -> dict[str, Any]:
        return self.runs.setdefault(run, {"about": {}, "points": {}, "files": [], "end": None})

    def point(self, run: str, name: str, step: int, value: Any) -> None:
        self.of(run)["points"].setdefault(name, []).append((step, value))

    # MLflow's client

    def create_run(self, group: str, run_name: str) -> Any:
        self.of(run := f"{run_name} {len(self.runs)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        self.of(run)["about"] |= {each.key: each.value for each in params}
        for each in metrics:
            self.point(run, each.key, each.step, each.value)

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics=self.of(run)["points"]))

    def get_metric_history(self, run: str, key: str) -> list[Any]:
        return [SimpleNamespace(step=step) for step, _ in self.of(run)["points"][key]]

    def log_image(self, run: str, image: Any, key: str, step: int) -> None:
        self.of(run)["files"].append(key)

    def log_text(self, run: str, text: str, name: str) -> None:
        self.of(run)["files"].append(name)

    def set_terminated(self, run: str, state: str) -> None:
        self.of(run)["end"] = state

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    # Weights & Biases

    def init(self, id: str, config: dict[str, Any], **options: Any) -> Any:
        self.of(id)["about"] |= {**config, "asked": options}

        def log(values: dict[str, Any], step: int) -> None:
            for name, value in values.items():
                self.point(id, name, step, value)

        return SimpleNamespace(log=log, finish=lambda exit_code: self.of(id).update(end=exit_code))


def test_trackers_get_what_a_run_measures(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run there for a run and its resume, each point once. The template's tests do it with the real packages."""

    def module(name: str, **contents: Any) -> None:
        found = ModuleType(name)
        vars(found).update(__spec__=ModuleSpec(name, None), **contents)
        monkeypatch.setitem(sys.modules, name, found)

    def entity(key: str, value: Any, time: int = 0, step: int = 0) -> Any:
        return SimpleNamespace(key=key, value=value, step=step)

    mlflow, wandb = Tracker(), Tracker()
    entities = {"Metric": entity, "Param": entity}
    module("mlflow", MlflowClient=lambda uri: mlflow, entities=SimpleNamespace(**entities))
    module("mlflow.entities", **entities)
    kinds = dict.fromkeys(("Settings", "Image", "Html", "Histogram"), lambda *_, **__: "shown")
    module("wandb", init=wandb.init, **kinds)
    names = "[library.writers.mlflow_writer.MlflowWriter, library.writers.wandb_writer.WandbWriter]"  # imported now
    words = ["--monitor.writers", names, "--progress.epoch_val", "4step"]
    shown = set()
    if "pictures" in installed():
        words += ["--pictures.number", "2"]
        shown = {"view/val"}
    folder = runs.train(*words, "--progress.max_steps", "6")
    runs.train(*words, "--progress.max_steps", "8", "--resume", "auto")
    assert " failed: " not in (folder / "train.log").read_text()
    for tracker in (mlflow, wandb):
        ((_, found),) = tracker.runs.items()
        for event in ("train", "val"):
            expected = [(each["step"], each["values"]["loss"]) for each in metrics(folder, event)]
            assert found["points"][f"{event}/loss"] == expected
    (there,), (here,) = mlflow.runs.values(), wandb.runs.values()
    assert there["about"]["model.width"] == "4" and here["about"]["model"]["width"] == 4
    assert {"run/config.txt", *shown} <= set(there["files"]) and {"run/config", *shown} <= set(here["points"])
    assert (there["end"], here["end"], here["about"]["asked"]["resume"]) == ("FINISHED", 0, "allow")
