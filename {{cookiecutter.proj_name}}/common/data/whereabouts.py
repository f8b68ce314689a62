"""The step and the samples that an error message names."""

from common.data.loader import BatchStream, Step
from common.distributed import Rank, gather_objects
from common.progress import Position

_SHOWN = 8  # sample numbers in a message


def whereabouts(stream: BatchStream, step: Step | None, at: Position) -> str:
    """The trainer's step and samples, given its position `at` and the last `step` it received."""
    if step is None:
        return "before the first step"
    if step.global_batch.after == at:
        return f"after training step {at.step}, epoch {at.epoch + (at.sample > 0 or at.epoch_size == 0)}"
    return f"training step {at.step + 1}, epoch {at.epoch + 1}{_samples(stream, at)}"


def bad_step(stream: BatchStream, step: int, here: bool, rank: Rank) -> str:
    """The ranks and samples for which the loss of a step was not finite. Every process must call this."""
    own = ""
    if here:
        own = f"rank {rank.rank}"
        if stream.steps_per_epoch is not None:
            epoch, number = divmod(step - 1, stream.steps_per_epoch)
            at = Position(step - 1, epoch, number * stream.samples_per_step, stream.epoch_size)
            own += _samples(stream, at)
    return "; ".join(filter(None, gather_objects(own, rank)))


def _samples(stream: BatchStream, at: Position) -> str:
    """Text with this process' samples of the step that begins at `at`; empty for data without indices."""
    numbers = [number for batch in stream.samples(at) for number in batch]
    if not numbers:
        return ""
    more = f", ... ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
    return f", of train samples {', '.join(map(str, numbers[:_SHOWN]))}{more}"
