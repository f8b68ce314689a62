"""Pictures of the data that are trained on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from loguru import logger

from common.base.errors import error_context
from common.distributed import Rank
from common.progress import Interval, Position, are_due
from common.run_context import RunContext
from common.task import Task
from common.trainer import Trainer
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
        is_due = last is None or True in are_due([every], last, at) or trainer.triggers.is_over(at)
        if is_due and not draw_training(trainer, gallery):
            trainer.monitor.after_step.remove(after_step)
            if trainer.rank.is_main:
                why = "the task has no `pictures`, and classifies no images or has an `update` of its own"
                logger.info("no pictures of training batches: {}", why)
        last = at

    if every:
        trainer.monitor.after_step.append(after_step)
    yield


def draw_training(trainer: Trainer, gallery: Gallery) -> bool:
    """Draw samples of the last batch on the main process; where a forward pass needs all processes, on all of them.

    Returns whether later batches may have pictures here.
    """
    evaluator = trainer.evaluator
    if trainer.latest_step is None or not (trainer.rank.is_main or trainer.strategy.lockstep_forward):
        return False
    task = trainer.task
    loaded = trainer.latest_step.batches[-1]
    draws_itself = type(task).pictures is not Task.pictures
    if not draws_itself:
        if type(task).update is not Task.update:  # it may not need `output`, which then may not work
            return False
        if not isinstance(loaded, Mapping) or "image" not in loaded:
            return False
    with evaluator.evaluating(), error_context("in drawing pictures of training data"):
        batch, output, _ = evaluator.measure(loaded)
        selection = gallery.begin(task, Rank(), "train")
        selection.add(task.post_process(output, batch), batch)
        pictures = selection.finish()
        gallery.write(trainer, "train", pictures)
    return draws_itself or bool(pictures)
