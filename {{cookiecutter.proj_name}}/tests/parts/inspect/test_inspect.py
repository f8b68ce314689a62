"""What a task shows at each log line."""

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.base.parts import installed
from parts.inspect.show import Show
from tests.conftest import Runs, load, metrics, same
from tests.samples import Classification

HERE = __name__


class Showing(Classification):
    """Shows what it can."""

    def inspect(self, show: Show) -> None:
        assert not self.training and not torch.is_grad_enabled()
        show.scalars({"norm": next(self.model.parameters()).norm(), "drawn": torch.rand(())})
        show.text("poem", f"at step {self.at.step}\nnothing rhymes")
        if "pictures" in installed():
            show.image("noise", np.ones((8, 8)))


def test_a_task_shows_what_it_wants(runs: Runs) -> None:
    """In the log, in metrics.jsonl and in TensorBoard; training stays as it is."""
    given = ["--monitor.writers", "[tensorboard]", "--progress.max_steps", "4"]
    folder = runs.train("--task.type", f"{HERE}.Showing", *given)
    assert [entry["step"] for entry in metrics(folder, "task")] == [2, 4]
    assert metrics(folder, "task")[0]["values"].keys() == {"norm", "drawn"}
    assert "poem:\nat step 2\nnothing rhymes" in (folder / "train.log").read_text()
    board = EventAccumulator(str(folder / "event")).Reload().Tags()
    assert "task/norm" in board["scalars"] and "task/poem/text_summary" in board["tensors"]
    assert ("task/noise" in board["images"]) == ("pictures" in installed())
    assert same(load(folder)["model"], load(runs.train(*given, name="silent"))["model"])
