"""The stage that a run is in, the settings that hold in each, and what can be wrong with them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from loguru import logger
from pydantic_core import to_jsonable_python
from torch.optim import Optimizer

from common.base.errors import UserError, error_context
from common.base.parts import part_of
from common.checkpoint.resume import Change, changes
from common.config import ABSENT, ConfigError, Problem
from common.config.check import Checker
from common.config.layers import merge
from common.config.reading import Reader
from common.config.source import node_of
from common.evaluation.loss import measured_losses
from common.model.freeze import freeze
from common.model.prepare import check_patterns
from common.optim import OptimConfig
from common.optim.groups import needs_closure, optimizer_class, parameter_groups
from common.optim.optimizer import own_values, parts_of
from common.optim.schedule import Schedule
from common.progress import Interval, Position
from common.stage import WholeRun
from common.task import Task
from library.schedules.plateau_schedule import Plateau
from parts.stages.config import StageConfig

if TYPE_CHECKING:
    from common.trainer import Trainer

PLATEAU = "plateau"
# Keys that a stage may change, but for `optim.accumulate` and those of other parts.
_STAGED = ("optim.*", "loss.*.weight", "loss.*.weight.*", "prepare.freeze")
_MAY_CHANGE = "a stage may set freeze, the weights of losses and most of optim"


def stage_layers(config: Any, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plain values of the run, and those of a stage that override them."""
    stage = config.stages[number]
    values = to_jsonable_python(replace(config, stages=[]))
    optim = stage.optim or {}
    below = values["optim"]
    if _optimizer(optim.get("optim_type", below["optim_type"])) != _optimizer(below["optim_type"]):
        below["args"] = {}  # those of another optimizer
    schedule, kind = optim.get("lr_scheduler"), below["lr_scheduler"]["type"]
    if isinstance(schedule, dict) and schedule.get("type", kind) != kind:
        below["lr_scheduler"]["args"] = {}
    freeze = {"freeze": [*config.prepare.freeze, *(stage.freeze or [])]}
    over = {"optim": optim, "loss": stage.loss, "prepare": freeze}
    return values, {name: part for name, part in over.items() if part}


def change_stage(trainer: "Trainer") -> None:
    """Have the trainer begin another stage."""
    trainer.check_losses()
    trainer.optimizer_step.updates.clear()  # frees their wrappers
    trainer.begin_stage()


def _optimizer(name: str) -> type[Optimizer] | str:
    """Return the class that a name means, in any case; the name itself if it means none."""
    try:
        return optimizer_class(name)
    except UserError:
        return name


def settings_in(config: Any, number: int) -> Any:
    """Return the settings that hold in a stage, counted from 0. Raises `ConfigError`."""
    if not config.stages and not number:
        return config
    if number >= len(config.stages):
        raise UserError(f"the checkpoint is in stage {number + 1}, but the config has {len(config.stages)} stages")
    return _overlaid(type(config), *stage_layers(config, number))


def _overlaid(schema: type, values: dict[str, Any], over: dict[str, Any]) -> Any:
    """Return the settings `values` with others laid over them. Raises `ConfigError`."""
    laid = Reader(merge(node_of(values, "default"), node_of(over, "default"), schema)).values
    checker = Checker(schema, [], ())
    settings = checker.section(schema, laid)
    if checker.problems:
        raise ConfigError(checker.problems)
    return settings


def stage_problems(config: Any) -> Iterator[Problem]:
    """Yield the problems of the stages: a wrong end, settings that cannot change during a run, mistakes in settings."""
    whole = replace(config, stages=[])
    known = {(problem.key, problem.rule) for problem in _mistakes(whole)}
    for number, stage in enumerate(config.stages):
        key = f"stages[{number}]"
        for mistake in _own_problems(config, number, stage):
            yield replace(mistake, key=f"{key}.{mistake.key}")
        problems = [problem for problem in _mistakes(config, number) if (problem.key, problem.rule) not in known]
        if not problems and not known:
            changed = changes(to_jsonable_python(whole), to_jsonable_python(settings_in(config, number)))
            fixed = [change for change in changed if not _may_change(change)]
            problems = [Problem(change.key, change.new, "cannot change during a run", _MAY_CHANGE) for change in fixed]
        for mistake in problems:
            yield replace(mistake, key=f"{key}.{mistake.key}", origin=None)


def _mistakes(config: Any, number: int | None = None) -> list[Problem]:
    """Return the problems of the whole config, or of that of a stage."""
    layers: tuple[dict[str, Any], dict[str, Any]] = (to_jsonable_python(config), {})
    if number is not None:
        layers = stage_layers(config, number)
    try:
        _overlaid(type(config), *layers)
    except ConfigError as error:
        return error.problems
    return []


def _may_change(change: Change) -> bool:
    """Return whether a stage may change a key: not those that other parts bring."""
    return change.matches(_STAGED) and change.key != "optim.accumulate" and part_of(change.key) is None


def _own_problems(config: Any, number: int, stage: StageConfig) -> Iterator[Problem]:
    if rule := _wrong_end(config, stage.until, is_last=number + 1 == len(config.stages)):
        yield Problem("until", stage.until, rule)
    for name in stage.loss or ():
        if name not in measured_losses(config.loss):
            hint = "give it a weight in the section loss, which a stage may set to 0"
            yield Problem(f"loss.{name}", ABSENT, "is none of the losses that the run computes", hint)


def _wrong_end(config: Any, until: int | float | str | None, *, is_last: bool) -> str:
    """Say what is wrong with the end of a stage; "" if nothing is."""
    if is_last:
        return "" if until is None else "the last stage ends with the run; remove this key"
    if until == PLATEAU:
        validates = config.dataset.val is not None and Interval.parse(config.progress.epoch_val, "epoch")
        return "" if validates else "needs dataset.val and progress.epoch_val, whose results it follows"
    try:
        return "" if Interval.parse(until, "epoch") else "every stage but the last one needs an end, as in 5epoch"
    except UserError:
        return 'must be plateau, "2000step", or a number of epochs above 0'


class Stages(WholeRun):
    """The stage that a run is in: the seat `stage` of a run with several.

    Args:
        task: not prepared yet: what is frozen in it stays frozen in all stages.

    Raises:
        UserError: a stage ends before it begins, or after the run.
    """

    changes = True
    may_be_new = True  # a run without stages was in the first

    def __init__(self, config: Any, total_steps: int | None, steps_per_epoch: int | None, task: Task) -> None:
        super().__init__(config, total_steps, steps_per_epoch)
        self._run = config
        self._ends: list[int | None] = []
        start, last = 0, math.inf if total_steps is None or config.debug.debug_mode else total_steps - 1
        for number, stage in enumerate(config.stages):
            is_open = stage.until in (None, PLATEAU)
            end = None if is_open else Interval.parse(stage.until, "epoch").in_steps(steps_per_epoch)
            where = f"stages[{number}].until {stage.until} is step {end}"
            if end is not None and not start < end <= last:
                raise UserError(f"{where}; it must be after step {start} and before the end of the run, {last + 1}")
            self._ends.append(end)
            start = end or start
        self._enter(0, 0)
        self._trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self._fixed = {name for name, module in task.named_modules() if "train" in vars(module)}
        self._frozen = self.config.prepare.freeze  # by `prepare`

    def __str__(self) -> str:
        return f"stage {self.number + 1} of {len(self._ends)}"

    def enter_if_due(self, trainer: "Trainer") -> None:
        """Enter the next stage if it is due, and say what it changes."""
        settings = to_jsonable_python(self.config)
        if not self.advance(trainer.at):
            return
        before = trainer.optimizer
        self._freeze(trainer.task)
        change_stage(trainer)
        take_over(trainer.optimizer, before)
        news = [str(change) for change in changes(settings, to_jsonable_python(self.config))]
        logger.info("{} after step {}: {}", self, trainer.at.step, "; ".join(news) or "no change")
        trainer.monitor.recorder.record("stage", step=trainer.at.step + 1, stage=self.number + 1, changed=news)

    def advance(self, at: Position) -> bool:
        """Enter the stage that is due at a position. Returns whether the stage changed."""
        before = self.number
        while self._is_over(at):
            self._enter(self.number + 1, at.step)
        return self.number != before

    def after_validation(self, value: float) -> None:
        """Tell the stage a validation result, which must be the same on every rank."""
        if self._run.stages[self.number].until == PLATEAU:
            self._plateau.after_validation(value)

    def forget_best(self) -> None:
        """Compare only later validations: the best value is of another metric."""
        self._plateau.state["best"] = None

    def schedule(self, optimizer: Optimizer) -> Schedule:
        """Build the schedule over the length of this stage, or over the rest of the run if a plateau ends it.

        Raises `UserError` if it does not fit; in the first stage, also if that of a later stage does not.
        """
        for number in range(1, 0 if self.number else len(self._ends)):
            with error_context(f"in stages[{number}]"):
                start = max(end or 0 for end in self._ends[:number])
                self._schedule(settings_in(self._run, number).optim, start, self._ends[number], optimizer)
        return self._schedule(self.config.optim, self.start, self._ends[self.number], optimizer)

    def _schedule(self, config: OptimConfig, start: int, end: int | None, optimizer: Optimizer) -> Schedule:
        """Build the schedule from step `start` to `end`, or to the end of the run."""
        end = end or self._total
        return Schedule(
            config.lr_scheduler,
            optimizer,
            None if end is None else end - start,
            self._steps_per_epoch,
            mode=self._run.best_mode,
            # After a plateau the length was unknown before.
            cut=self._run.debug.debug_mode or end == self._run.progress.max_steps or None in self._ends[: self.number],
        )

    def resume(self, trainer: "Trainer", state: Mapping[str, Any]) -> None:
        """Continue in the stage of a checkpoint; one without stages was in the first."""
        if "stages" in state:
            self.load_state_dict(state["stages"])
            if self.number:  # else the trainer is in it, and plugins may have hooked its optimizer
                self._freeze(trainer.task)
                change_stage(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the number and start of the stage, and the state of its plateau."""
        return {"number": self.number, "start": self.start, "plateau": self._plateau.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the saved stage. Raises `UserError` if the config does not have it."""
        if not state:
            return
        if state["number"] >= len(self._run.stages):
            raise UserError(f"the checkpoint is in stage {state['number'] + 1}, but there are only {len(self._ends)}")
        self._enter(state["number"], state["start"])
        self._plateau.state = dict(state["plateau"])

    def _freeze(self, task: Task) -> None:
        """Freeze what this stage does not train, and nothing else."""
        patterns = self.config.prepare.freeze
        if patterns == self._frozen:
            return
        for parameter in self._trained:
            parameter.requires_grad_(True)
        for name, module in task.named_modules():
            if "train" in vars(module) and name not in self._fixed:
                del module.train
        task.train()  # what is fixed stays as it is
        freeze(task, patterns)
        self._frozen = patterns

    def _enter(self, number: int, start: int) -> None:
        self.number = number
        self.start = start
        self.config = settings_in(self._run, number)
        stage = self._run.stages[number]
        self._plateau = Plateau(0.0, self._run.best_mode, stage.patience, stage.threshold)

    def _is_over(self, at: Position) -> bool:
        if self.number + 1 >= len(self._ends):
            return False
        end = self._ends[self.number]
        return self._plateau(0) < 1.0 if end is None else at.step >= end


def take_over(optimizer: Optimizer, before: Optimizer) -> None:
    """Give an optimizer the state that the one before it has of parameters whose class and arguments are the same."""
    if needs_closure(before):
        return
    varied = {"lr": None, "weight_decay": None, "differentiable": False}  # which torch adds when it loads a state
    old = {}
    for part in parts_of(before):
        kind = type(part), part.defaults | varied
        for group in part.param_groups:
            for parameter in group["params"]:
                old[parameter] = kind, group
    for part in parts_of(optimizer):
        kind = type(part), part.defaults | varied
        for group in part.param_groups:
            kept = [parameter for parameter in group["params"] if parameter in old and old[parameter][0] == kind]
            for parameter in kept:
                if parameter in before.state:
                    optimizer.state[parameter] = before.state[parameter]
            if kept:
                group.update(own_values(part, old[kept[0]][1]))


def check_stages(config: Any, task: Task) -> None:
    """Raise `UserError` if a pattern or group of a stage fits no weight, or if a stage leaves nothing to train."""
    for number in range(len(config.stages)):
        settings = settings_in(config, number)
        with error_context(f"in stages[{number}].optim"):
            parameter_groups(settings.optim, task, task.groups())
        with error_context(f"in stages[{number}].freeze"):
            frozen = settings.prepare
            check_patterns(task, frozen)
            trained = (name for name, parameter in task.named_parameters() if parameter.requires_grad)
            if all(any(fnmatchcase(name, pattern) for pattern in frozen.freeze) for name in trained):
                raise UserError("every parameter is frozen, so there is nothing to train")


def build(config: Any, total_steps: int | None, steps_per_epoch: int | None, task: Task) -> WholeRun:
    """Fill the seat `stage` of a run."""
    if config.stages:
        return Stages(config, total_steps, steps_per_epoch, task)
    return WholeRun(config, total_steps, steps_per_epoch)
