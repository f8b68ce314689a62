"""Pictures of the data that are trained on."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    if not isinstance(gallery, Gallery):
        yield
        return
    every = Interval.parse(gallery.config.every, "step")
    last: Position | None = None  # the position at the last look

    def after_step() -> None:
        nonlocal last
        at = trainer.at
        if last is None or every.is_due(last, at) or trainer.triggers.is_over(at):
            draw_training(trainer, gallery)
        last = at

    if type(trainer.task).pictures is Task.pictures:
        if gallery.config != PicturesConfig():
            logger.info("pictures: none, since {} draws none: see Task.pictures", type(trainer.task).__name__)
    elif every:
        trainer.monitor.after_step.append(after_step)
    yield


def draw_training(trainer: Trainer, gallery: Gallery) -> None:
    """Draw samples of the last batch on the main process; where a forward pass needs all processes, on all of them."""
    evaluator = trainer.evaluator
    if trainer.latest_step is None or not (trainer.rank.is_main or trainer.strategy.lockstep_forward):
        return
    with evaluator.evaluating(), error_context(lambda: "in drawing pictures of training data"):
        batch, output, _ = evaluator.measure(trainer.latest_step.batches[-1])
        selection = gallery.begin(trainer.task, Rank(), "train")
        selection.add(trainer.task.post_process(output, batch), batch)
        gallery.write(trainer, "train", selection.finish())
