"""When things happen during a run. Each entry becomes a `Period`, so that all of them are asked the same way."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from common.config import section
from common.period import EpochPeriod, Period, Position, StepPeriod


@section
class ProgressConfig:
    """Length and rhythm of a run. Periods are numbers, "200step" or "0.5epoch"; -1, 0 or null means never.

    What is on also happens after the last step.
    """

    start_epoch: Annotated[
        int,
        Field(ge=-1, le=0, description="with resume: -1 goes on where the checkpoint stopped, 0 takes only weights"),
    ] = -1
    epoch: Annotated[int | None, Field(ge=1, description="epochs to train; null: max_steps alone decides")] = 40
    max_steps: Annotated[int | None, Field(ge=1, description="optimizer steps to train; null: epoch alone decides")] = (
        None
    )
    epoch_loss: Annotated[int, Field(ge=1, description="log only in every n-th epoch")] = 1
    iter_loss: Annotated[StepPeriod, Field(description="log line and scalars; steps")] = 50
    save_progress: Annotated[bool, Field(description="show training pictures")] = True
    epoch_save_progress: Annotated[int, Field(ge=1, description="pictures only in every n-th epoch")] = 1
    iter_save_progress: Annotated[StepPeriod, Field(description="training pictures; steps")] = 100
    max_samples_train: Annotated[int, Field(ge=1, description="training pictures each time")] = 5
    epoch_val: Annotated[EpochPeriod, Field(description="validation; epochs")] = 1
    save_progress_val: Annotated[bool, Field(description="show validation pictures")] = True
    max_samples_val: Annotated[int, Field(ge=0, description="validation pictures each time")] = 5
    init_eval: Annotated[bool, Field(description="evaluate before the first step")] = False
    epoch_eval: Annotated[EpochPeriod, Field(description="evaluation on dataset.eval; epochs")] = 10
    max_samples_eval: Annotated[int, Field(ge=0, description="evaluation pictures each time")] = 10
    local_progress: Annotated[bool, Field(description="write pictures as files too, not only to TensorBoard")] = False
    save_time: Annotated[
        float | None, Field(description="save latest.pt after this many seconds; -1 or null: never")
    ] = 1800.0
    epoch_save_latest: Annotated[EpochPeriod, Field(description="save latest.pt; epochs")] = 1
    epoch_save_checkpoint: Annotated[EpochPeriod, Field(description="save a numbered checkpoint; epochs")] = 10

    def __post_init__(self) -> None:
        if self.epoch is None and self.max_steps is None:
            raise ValueError("epoch and max_steps are both null, so the run would never end; set one of them")


class Due(NamedTuple):
    """What happens after a step."""

    log: bool = False
    pictures: bool = False
    validate: bool = False
    evaluate: bool = False
    save_latest: bool = False
    save_numbered: bool = False


_NOTHING = Due()


@dataclass(frozen=True)
class Rhythm:
    """The periods of a run."""

    log: Period
    pictures: Period
    validate: Period
    evaluate: Period
    save_latest: Period
    save_numbered: Period

    @classmethod
    def of(cls, config: ProgressConfig) -> "Rhythm":
        return cls(
            log=Period.parse(config.iter_loss, "step"),
            pictures=Period.parse(config.iter_save_progress if config.save_progress else None, "step"),
            validate=Period.parse(config.epoch_val, "epoch"),
            evaluate=Period.parse(config.epoch_eval, "epoch"),
            save_latest=Period.parse(config.epoch_save_latest, "epoch"),
            save_numbered=Period.parse(config.epoch_save_checkpoint, "epoch"),
        )

    def due(self, before: Position, after: Position, *, last: bool) -> Due:
        """What is due once the step from `before` to `after` is done; after the last step, everything that is on."""
        if last:
            return Due(*map(bool, self.periods))
        # Mostly nothing is. Inside an epoch only those can be due that are not of whole epochs.
        for period in self.within_epochs if after.epoch == before.epoch else self.periods:
            if period.due(before, after):
                return Due(*(each.due(before, after) for each in self.periods))
        return _NOTHING

    @cached_property
    def within_epochs(self) -> tuple[Period, ...]:
        """Those that can be due before an epoch has ended."""
        return tuple(each for each in self.periods if each and (each.unit == "step" or each.divisor > 1))

    @cached_property
    def periods(self) -> tuple[Period, ...]:
        """In the order of `Due`."""
        return (self.log, self.pictures, self.validate, self.evaluate, self.save_latest, self.save_numbered)

    def table(self, without: Collection[str] = ()) -> str:
        """What happens when, one line each, in the order of the loop; for those in `without` there are no data."""
        rows = {
            "log line, scalars": self.log,
            "training pictures": self.pictures,
            "validation": self.validate,
            "evaluation": self.evaluate,
            "latest.pt": self.save_latest,
            "step_*.pt": self.save_numbered,
        }
        return "\n".join(
            f"  {name:<18} {'never (no data)' if name in without else period}" for name, period in rows.items()
        )


@dataclass(frozen=True)
class Outcome:
    """How training ended: `reason` is finished, early_stop or the name of a signal."""

    reason: str
    at: Position
    values: dict[str, float]
    checkpoint: Path
    exit_code: int = 0


def is_over(at: Position, config: ProgressConfig) -> bool:
    """Whether the run has come as far as the config wants."""
    return (config.epoch is not None and at.epoch >= config.epoch) or (
        config.max_steps is not None and at.step >= config.max_steps
    )


def total_steps(config: ProgressConfig, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps of the whole run; None when the data has no length and `max_steps` is not given."""
    by_epochs = None if config.epoch is None or steps_per_epoch is None else config.epoch * steps_per_epoch
    known = [steps for steps in (by_epochs, config.max_steps) if steps is not None]
    return min(known, default=None)
