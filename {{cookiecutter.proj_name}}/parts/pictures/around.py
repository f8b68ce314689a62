"""Pictures of the data that are trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loguru import logger

from common.base.errors import error_context
from common.distributed import Rank
from common.progress import Interval, Position
from common.run_context import RunContext
from common.task import Task
from common.trainer import Trainer
from parts.pictures.config import PicturesConfig
from parts.pictures.gallery import Gallery


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Draw samples of training steps: of the first after a start, every so often, and of the last."""
    gallery = trainer.evaluator.gallery
    if isinstance(gallery, Gallery):
        every = Interval.parse(gallery.config.every, "step")
        if type(trainer.task).pictures is Task.pictures:
            if gallery.config != PicturesConfig():
                logger.info("pictures: none, since {} draws none: see Task.pictures", type(trainer.task).__name__)
        elif every:
            trainer.monitor.after_step.append(Draw(trainer, gallery, every))
    yield


@dataclass
class Draw:
    """Draws samples after a step for which it is due. `last`: the position at the last look."""

    trainer: Trainer
    gallery: Gallery
    every: Interval
    last: Position | None = None

    def __call__(self) -> None:
        at = self.trainer.at
        if self.last is None or self.every.is_due(self.last, at) or self.trainer.triggers.is_over(at):
            draw_training(self.trainer, self.gallery)
        self.last = at


def draw_training(trainer: Trainer, gallery: Gallery) -> None:
    """Draw samples of the last batch on the main process; where a forward pass needs all processes, on all of them."""
    evaluator = trainer.evaluator
    if trainer.latest_step is None or not (trainer.rank.is_main or trainer.strategy.lockstep_forward):
        return
    with evaluator.evaluating(), error_context(lambda: "in drawing pictures of training data"):
        batch, output, _ = evaluator.measure(trainer.latest_step.batches[-1])
        selection = gallery.begin(trainer.task, Rank())
        selection.add(trainer.task.post_process(output, batch), batch)
        gallery.write(trainer, "train", selection.finish())
