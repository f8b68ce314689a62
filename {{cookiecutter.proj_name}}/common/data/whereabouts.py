"""The step and the samples that an error message names."""

from common.data.loader import BatchStream, Step
from common.distributed import Rank
from common.progress import Position

_SHOWN = 8  # sample numbers in a message


def whereabouts(stream: BatchStream, step: Step | None, at: Position) -> str:
    """Return the trainer's step and samples, given its position `at` and the last `step` it received."""
    if step is None:
        return "before the first step"
    if step.global_batch.after == at:
        return f"after training step {at.step}, epoch {at.epoch + (at.sample > 0 or at.epoch_size == 0)}"
    return f"training step {at.step + 1}, epoch {at.epoch + 1}{sample_text(stream.samples(at))}"


def bad_samples(stream: BatchStream, step: int, rank: Rank) -> str:
    """This rank and its samples of a step, counted from 1."""
    if stream.steps_per_epoch is None:
        return f"rank {rank.rank}"
    epoch, number = divmod(step - 1, stream.steps_per_epoch)
    at = Position(step - 1, epoch, number * stream.samples_per_step, stream.epoch_size)
    return f"rank {rank.rank}{sample_text(stream.samples(at))}"


def sample_text(batches: list[list[int]]) -> str:
    """Name the first samples of these batches; empty for data without indices."""
    numbers = [number for batch in batches for number in batch]
    if not numbers:
        return ""
    more = f", ... ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
    return f", of train samples {', '.join(map(str, numbers[:_SHOWN]))}{more}"
