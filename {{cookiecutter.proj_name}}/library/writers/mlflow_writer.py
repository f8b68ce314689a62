"""Curves, pictures and texts in MLflow: a database on the disk, or a server."""

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from common.base.text import flat
from common.config.registry import WRITER_REGISTRY, needs
from common.monitor.writer import Writer, WriterRun

needs("mlflow")  # imported where it is used

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_LONGEST = 6000  # characters of a parameter


@WRITER_REGISTRY.register("mlflow")
class MlflowWriter(Writer):
    """A run of MLflow with the config as parameters, curves, pictures and texts.

    `mlflow_run.txt` in the run folder has the id of MLflow's run, so a resume continues the same one. MLflow cannot
    remove points: the steps that an earlier attempt has logged are not logged again.

    Args:
        run: supplied by the program.
        tracking_uri: a server or a database; null: `mlflow.db` beside the run folders, with pictures in `mlflow/`.
            "env": as MLflow's environment variables say.
        experiment: MLflow's name for a group of runs; null: the name of the folder of the runs.
    """

    def __init__(self, run: WriterRun, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        import mlflow

        folder = run.folder.resolve().parent
        uri = tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        self.client = mlflow.MlflowClient(None if uri == "env" else uri)
        self.known: dict[str, int] = {}  # the last step of each curve, of an earlier attempt
        file = run.folder / "mlflow_run.txt"
        if file.exists():
            self.id = file.read_text()
            self.client.update_run(self.id, status="RUNNING")
            for key in self.client.get_run(self.id).data.metrics:
                self.known[key] = max(point.step for point in self.client.get_metric_history(self.id, key))
            return
        name = experiment or folder.name
        existing = self.client.get_experiment_by_name(name)
        address = None if tracking_uri else (folder / "mlflow").as_uri()
        group = existing.experiment_id if existing else self.client.create_experiment(name, artifact_location=address)
        self.id = self.client.create_run(group, run_name=run.name).info.run_id
        params = [mlflow.entities.Param(key, str(value)[:_LONGEST]) for key, value in flat(run.config).items()]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self.client.log_batch(self.id, params=params[first : first + 100])
        file.write_text(self.id)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(f"{event}/{name}", float(value), now, step) for name, value in values.items()]
        if new := [point for point in points if step > self.known.get(point.key, -1)]:
            self.client.log_batch(self.id, metrics=new)

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        self.client.log_image(self.id, image, key=tag, step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self.client.log_text(self.id, text, f"{tag}.txt")

    def close(self, state: str) -> None:
        if state in _STATUS:
            self.client.set_terminated(self.id, _STATUS[state])
