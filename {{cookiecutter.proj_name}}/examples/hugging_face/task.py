"""Predicting each token from those before it."""

from torch import Tensor
from torch.nn import functional as F

from common.task import Task

Batch = dict[str, Tensor]
"""`input_ids` and `attention_mask` (B, T), int64; the mask is 0 on padding, which is at the end."""


class TextTask(Task):
    """The loss is the mean over tokens, in nats."""

    def output(self, batch: Batch) -> Tensor:
        """Logits (B, T, vocabulary)."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the mean cross entropy of the tokens after the first one of each text."""
        real = batch["attention_mask"][:, 1:].bool()
        return {"loss": F.cross_entropy(output[:, :-1][real], batch["input_ids"][:, 1:][real])}

    def count(self, batch: Batch) -> int:
        """Count the tokens to predict: each counts equally, whichever texts share a batch or a process with it."""
        return int(batch["attention_mask"][:, 1:].sum())
