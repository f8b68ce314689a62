"""Predicting the next measurement; the loss is PyTorch's, named in config.yaml."""

from torch import Tensor

from common.task import Task


class ForecastTask(Task):
    """A batch has `past` (B, past) and `future` (B, 1), float."""

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `forecast` (B, 1)."""
        return {"forecast": self.model(batch["past"])}
