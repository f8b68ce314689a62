"""The two tasks. Padding counts in neither: not in a sentence's mean, nor in the mean loss over words."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from common.task import Task
from examples.text.data import WORDS, Sentences


class SentenceTask(Task):
    """Predicts the class of each sentence. The loss and the metric are named in config.yaml."""

    def output(self, batch: Sentences) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["words"], batch["mask"])}

    def describe(self, output: dict[str, Tensor], batch: Sentences) -> list[dict[str, Any]]:
        """For each sentence its class and the probability of it."""
        probabilities, numbers = output["logits"].softmax(dim=1).max(dim=1)
        rows = zip(numbers.tolist(), probabilities.tolist(), strict=True)
        return [{"class": self.classes[number], "probability": round(value, 6)} for number, value in rows]


class NextWordTask(Task):
    """Predicts each word from those before it; the loss is the mean over words, in nats."""

    unit = "words"

    def output(self, batch: Sentences) -> Tensor:
        """Logits (B, T, vocabulary)."""
        return self.model(batch["words"], batch["mask"])

    def losses(self, output: Tensor, batch: Sentences) -> dict[str, Tensor]:
        """Return the mean cross entropy of the words after the first one of each sentence."""
        real = batch["mask"][:, 1:]
        return {"loss": F.cross_entropy(output[:, :-1][real], batch["words"][:, 1:][real])}

    def count(self, batch: Sentences) -> int:
        """Count the words to predict.

        So each counts equally, whichever sentences share a batch or a process with it.
        """
        return int(batch["mask"][:, 1:].sum())

    def describe(self, output: Tensor, batch: Sentences) -> list[dict[str, Any]]:
        """For each sentence the most probable word after it."""
        last = batch["mask"].sum(dim=1) - 1
        return [{"next": WORDS[row[at].argmax()]} for row, at in zip(output, last, strict=True)]
