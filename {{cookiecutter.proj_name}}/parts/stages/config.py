"""What this part adds to the configuration: `stages`."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field

from common.config import Problem, section


@section
class StageConfig:
    """A stage of training: its keys are laid over those of the run, not over those of the stage before it."""

    until: int | float | str | None = None
    """where in the run it ends: epochs, "2000step", or plateau; null: with the run"""
    patience: Annotated[int, Field(ge=0)] = 10
    """plateau: validations without progress before its end"""
    threshold: Annotated[float, Field(ge=0.0)] = 1e-4
    """plateau: relative change that counts as progress"""
    freeze: list[str] | None = None
    """not trained, besides prepare.freeze"""
    optim: dict[str, Any] | None = None
    """keys of optim; a schedule begins anew"""
    loss: dict[str, Any] | None = None
    """weights: {CrossEntropyLoss: {weight: 0.5}}"""


@section
class RunConfig:
    """The key that this part adds to the configuration of a run."""

    stages: list[StageConfig] = field(default_factory=list)
    """[{until: 5epoch, freeze: [...], optim: {...}}, ...]; empty: one stage"""


def problems(config: Any) -> Iterator[Problem]:
    """Yield what is wrong with the stages of a run."""
    if config.stages:
        from parts.stages.stages import stage_problems  # it imports what has sections itself

        yield from stage_problems(config)
