"""The section `stages`: what the config of a run may change in the course of it. See docs/stages.md."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic_core import to_jsonable_python

from common.base.errors import UserError
from common.checkpoint.fingerprint import Change, changes
from common.config import ABSENT, ConfigError, Problem, overlaid, section
from common.optim.stages import PLATEAU
from common.progress import Interval
from custom.best_mode import measured_losses

if TYPE_CHECKING:
    from custom.config import Config

# Keys that a stage may change, and those of them that it must not.
_STAGED = ("optim.*", "loss.*.weight", "loss.*.weight.*", "dataset.train.*", "prepare.freeze")
_FIXED = ("optim.accumulate", "optim.ema.*")


@section
class StageConfig:
    """A stage of training: its keys are laid over those of the run, not over those of the stage before it."""

    until: Annotated[
        int | float | str | None,
        Field(description='where in the run it ends: epochs, "2000step", or plateau; null: with the run'),
    ] = None
    freeze: Annotated[list[str] | None, Field(description="not trained, besides prepare.freeze")] = None
    optim: Annotated[dict[str, Any] | None, Field(description="keys of optim")] = None
    lr_scheduler: Annotated[
        dict[str, Any] | None, Field(description="keys of optim.lr_scheduler; lengths count from the stage's start")
    ] = None
    loss: Annotated[dict[str, Any] | None, Field(description="weights: {CrossEntropyLoss: {weight: 0.5}}")] = None
    dataset: Annotated[dict[str, Any] | None, Field(description="train: keys of dataset.train")] = None

    @property
    def all_of_optim(self) -> dict[str, Any]:
        """The keys of optim, with those of its lr_scheduler."""
        return {**(self.optim or {}), **({"lr_scheduler": self.lr_scheduler} if self.lr_scheduler else {})}


def stage_layers(config: "Config", number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain values: those of the run, and those of a stage to lay over them."""
    stage = config.stages[number]
    values, optim = to_jsonable_python(replace(config, stages=[])), stage.all_of_optim
    below = values["optim"]
    if optim.get("optim_type", below["optim_type"]) != below["optim_type"]:
        below["args"] = {}  # those of another optimizer
    if optim.get("lr_scheduler", {}).get("type", below["lr_scheduler"]["type"]) != below["lr_scheduler"]["type"]:
        below["lr_scheduler"]["args"] = {}
    freeze = {"freeze": [*config.prepare.freeze, *(stage.freeze or [])]}
    over = {"optim": optim, "loss": stage.loss, "dataset": stage.dataset, "prepare": freeze}
    return values, {name: part for name, part in over.items() if part}


def stage_problems(config: "Config") -> Iterator[Problem]:
    """Stages with a wrong end, with settings that cannot change in a run, or with mistakes in these."""
    if not config.stages:
        return
    whole = replace(config, stages=[])
    own = {(each.key, each.rule) for each in _mistakes(whole)}
    for number, stage in enumerate(config.stages):
        key = f"stages[{number}]"
        for each in _own_problems(config, number, stage):
            yield replace(each, key=f"{key}.{each.key}")
        problems = [each for each in _mistakes(config, number) if (each.key, each.rule) not in own]
        if not problems and not own:
            changed = changes(to_jsonable_python(whole), to_jsonable_python(config.in_stage(number)))
            problems = [_fixed(each) for each in changed if each.matches(_FIXED) or not each.matches(_STAGED)]
        for each in problems:
            at = each.key.replace("optim.lr_scheduler", "lr_scheduler") if stage.lr_scheduler else each.key
            yield replace(each, key=f"{key}.{at}", origin=None)


def _mistakes(config: "Config", number: int | None = None) -> list[Problem]:
    """Those of the whole config, or of that of a stage."""
    try:
        overlaid(type(config), *([to_jsonable_python(config)] if number is None else stage_layers(config, number)))
    except ConfigError as error:
        return error.problems
    return []


def _own_problems(config: "Config", number: int, stage: StageConfig) -> Iterator[Problem]:
    if rule := _wrong_end(config, stage.until, is_last=number + 1 == len(config.stages)):
        yield Problem("until", stage.until, rule)
    if stage.lr_scheduler and "lr_scheduler" in (stage.optim or {}):
        yield Problem("optim.lr_scheduler", ABSENT, "the stage has a key lr_scheduler too", "keep one")
    if stage.freeze and config.dist.strategy == "fsdp":
        rule = "dist.strategy fsdp cannot change which weights are trained"
        yield Problem("freeze", stage.freeze, rule, "use ddp, or prepare.freeze for the whole run")
    for name in stage.loss or ():
        if name not in measured_losses(config.loss)[1:]:
            hint = "give it a weight in the section loss, which a stage may set to 0"
            yield Problem(f"loss.{name}", ABSENT, "is none of the losses that the run computes", hint)


def _wrong_end(config: "Config", until: int | float | str | None, *, is_last: bool) -> str:
    """What is wrong with the end of a stage; empty if nothing is."""
    if is_last:
        return "" if until is None else "the last stage ends with the run; remove this key"
    if until == PLATEAU:
        validates = config.dataset.val is not None and Interval.parse(config.progress.epoch_val, "epoch")
        return "" if validates else "needs dataset.val and progress.epoch_val, whose results it follows"
    try:
        return "" if Interval.parse(until, "epoch") else "every stage but the last one needs an end, as in 5epoch"
    except UserError:
        return 'must be plateau, "2000step", or a number of epochs above 0'


def _fixed(change: Change) -> Problem:
    hint = "a stage may set freeze, lr_scheduler, the weights of losses, dataset.train and most of optim"
    return Problem(change.key, change.new, "cannot change in the course of a run", hint)
