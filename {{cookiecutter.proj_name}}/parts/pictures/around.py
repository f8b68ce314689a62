"""Pictures of the data that are trained on."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.base.errors import error_context
from common.distributed import Rank
from common.progress import Interval
from common.run_context import RunContext
from common.task import Task
from common.trainer import Trainer
from parts.pictures.gallery import Gallery


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Draw samples of training steps: of the first after a start, every so often, and of the last."""
    gallery = trainer.evaluator.gallery
    if isinstance(gallery, Gallery) and type(trainer.task).pictures is not Task.pictures:
        every = Interval.parse(gallery.config.every, "step")
        drawn = -1  # how often the interval had passed at the last pictures

        def after_step() -> None:
            nonlocal drawn
            passed = every.times_passed(trainer.at)
            if passed > drawn or trainer.triggers.is_over(trainer.at):
                drawn = passed
                draw_training(trainer, gallery)

        if every:
            trainer.monitor.after_step.append(after_step)
    yield


def draw_training(trainer: Trainer, gallery: Gallery) -> None:
    """Draw samples of the last batch on the main process; where a forward pass needs all processes, on all of them."""
    evaluator = trainer.evaluator
    if trainer.step is None or not (trainer.rank.is_main or trainer.strategy.lockstep_forward):
        return
    with evaluator.evaluating(), error_context(lambda: "in drawing pictures of training data"):
        batch, output, _ = evaluator.measure(trainer.step.batches[-1])
        selection = gallery.begin(trainer.task, Rank())
        selection.add(trainer.task.post_process(output, batch), batch)
        gallery.write(trainer, "train", selection.finish())
