"""Predicting the next character; the log shows what the model would write."""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.base.errors import UserError
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Task
from examples.language_model.data import PADDING, decode, encode
from examples.language_model.model import GPT
from parts.inspect.show import Show


class LanguageModelTask(Task):
    """The mean cross entropy over all characters of a batch, in nats. A sample is written at every log line.

    Args:
        prompt: what each sample begins with; not empty.
        length: characters to write.
        temperature: > 0; below 1, likely characters become more likely.
    """

    model: GPT
    unit = "characters"

    def __init__(
        self,
        model: GPT,
        loss: LossFactory,
        metric: MetricFactory,
        prompt: str = "\n",
        length: int = 200,
        temperature: float = 0.8,
    ) -> None:
        super().__init__(model, loss, metric)
        self.prompt, self.length, self.temperature = encode(prompt).tolist(), length, temperature
        if not self.prompt:
            raise UserError(f"task.prompt: {prompt!r} has no character that the model knows; it needs at least one")

    def output(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input"])

    def losses(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(output.flatten(0, 1), batch["target"].flatten(), ignore_index=PADDING)}

    def count(self, batch: dict[str, Tensor]) -> int:
        """Count the characters to predict: all count equally, however they are divided into batches."""
        return int((batch["target"] != PADDING).sum())

    def inspect(self, show: Show) -> None:
        """Called at each log line, in evaluation mode and without gradients."""
        show.text("sample", self.sample())

    def sample(self) -> str:
        """Text after the prompt. The numbers drawn depend on the step alone: a resumed run writes the same."""
        generator = torch.Generator().manual_seed(self.at.step)
        context, device = self.model.context, next(self.model.parameters()).device
        written = list(self.prompt)
        for _ in range(self.length):
            seen = written[-context:]
            # Always the same shape, so that a compiler need not compile again. No character sees those after it.
            characters = torch.tensor([seen + [0] * (context - len(seen))], device=device)
            logits = self.model(characters)[0, len(seen) - 1].float().cpu()
            chances = (logits / self.temperature).softmax(dim=0)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
        return decode(written)
