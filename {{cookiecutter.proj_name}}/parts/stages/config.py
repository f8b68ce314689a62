"""What this part adds to the configuration: `stages`."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field

from common.config import Problem, section


@section
class StageConfig:
    """A stage of training: its keys are laid over those of the run, not over those of the stage before it."""

    until: Annotated[
        int | float | str | None,
        Field(description='where in the run it ends: epochs, "2000step", or plateau; null: with the run'),
    ] = None
    patience: Annotated[int, Field(ge=0, description="plateau: validations without progress before its end")] = 10
    threshold: Annotated[float, Field(ge=0.0, description="plateau: relative change that counts as progress")] = 1e-4
    freeze: Annotated[list[str] | None, Field(description="not trained, besides prepare.freeze")] = None
    optim: Annotated[
        dict[str, Any] | None,
        Field(description="keys of optim; a schedule begins anew"),
    ] = None
    loss: Annotated[dict[str, Any] | None, Field(description="weights: {CrossEntropyLoss: {weight: 0.5}}")] = None


@section
class RunConfig:
    """The key that this part adds to the configuration of a run."""

    stages: Annotated[
        list[StageConfig],
        Field(description="[{until: 5epoch, freeze: [...], optim: {...}}, ...]; empty: one stage"),
    ] = field(default_factory=list)


def problems(config: Any) -> Iterator[Problem]:
    """Yield what is wrong with the stages of a run."""
    if config.stages:
        from parts.stages.stages import stage_problems  # it imports what has sections itself

        yield from stage_problems(config)
