"""The training loop. Read `Trainer.train`: it calls everything that happens during a run by name, in order."""

import signal
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from common.base.errors import error_context
from common.base.files import warn_on_oserror
from common.base.parts import AVERAGE, fill, refuse_absent
from common.checkpoint.folder import CheckpointFolder
from common.checkpoint.layout import Layout
from common.checkpoint.resume import NOT_EXACT, accept_changes, fingerprint
from common.checkpoint.saver import Saver
from common.checkpoint.state import RunState
from common.data.loader import Step, TrainStream, whereabouts
from common.data.workers import stop_waiting_when
from common.distributed import max_over_ranks, share_buffers
from common.distributed.seed import mix, set_seed
from common.evaluation.best import BestTracker
from common.evaluator import EvaluationInterrupted, Evaluator, Gallery
from common.failure.signals import StopSignals, exit_code
from common.finite import ScaledSteps, are_finite, bad_loss, not_finite, step_check
from common.model import Strategy, check_trained, prepare
from common.monitor.line import current_epoch
from common.monitor.result import SplitResult
from common.optim import build_optimizer
from common.optim.average import Average
from common.optim.schedule import Schedule
from common.progress import Outcome, Position, TrainState, Triggers, resumed_position, total_steps
from common.run_context import RunContext
from common.settings import RunConfig
from common.stage import WholeRun
from common.step import OptimizerStep, step_class
from common.task import Built, Task, TaskPosition


class Trainer:
    """Trains one task. `progress` holds position and counters, `state` everything else that a checkpoint holds."""

    # Seats: what parts/NAME may replace; without that folder, an object of the type named here.
    # To delete a part: rm -r parts/NAME tests/parts/NAME docs/parts/NAME.md.
    stage: WholeRun  # the settings in force: common/stage.py
    average: Average  # the weights that are evaluated: common/optim/average.py

    # What is trained, how, and on what. A new stage replaces those from `parameters` on.
    task: Task
    strategy: Strategy  # how processes share the work: common/model/strategy.py
    stream: TrainStream  # the order of its samples is a function of seed and epoch
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    schedule: Schedule
    optimizer_step: OptimizerStep  # the seat `step` (common/step.py), with the seat `guard` (common/finite.py)

    # When things happen, and results.
    triggers: Triggers
    total_steps: int | None
    evaluator: Evaluator  # with the seat `gallery`: common/evaluator.py
    best: BestTracker
    classes: int | None  # that the model distinguishes, if parts/checks saw it in the first output

    # Where the run is, and what is saved.
    progress: TrainState
    latest_step: Step | None  # its data
    state: RunState
    saver: Saver

    def __init__(self, config: RunConfig, built: Built, run: RunContext) -> None:
        self.config = config
        self.run = run
        self.rank = run.rank
        self.paths = run.paths
        self.monitor = run.monitor
        self.stop_signals = StopSignals(self.rank)
        stop_waiting_when(lambda: 0)  # another run of this process may have been stopped

        self.task = built.task
        self.stream = built.stream
        self.val = built.val
        self.evaluation = built.evaluation

        steps_per_epoch = self.stream.steps_per_epoch
        self.total_steps = total_steps(config.progress, steps_per_epoch)
        self.triggers = Triggers(config.progress, steps_per_epoch)
        self.progress = TrainState(Position(epoch_size=self.stream.epoch_size))
        self.latest_step = None
        self.classes = None
        self.best = BestTracker(config.best, config.early_stop, config.best_mode)
        lengths = (self.total_steps, steps_per_epoch)
        self.stage = fill("stages", "stages", WholeRun(config, *lengths), config, *lengths, self.task)

        self.strategy = prepare(self.task, self.stage.config.prepare, config.dist, built.precision, self.rank)
        precision = self.strategy.precision
        lockstep = self.strategy.lockstep_forward
        gallery: Gallery | None = fill("pictures", "gallery", None, config)
        self.evaluator = Evaluator(self.task, self.rank, precision, gallery, lockstep, lambda: self.stop_signals.signal)
        self.average = fill(AVERAGE, "average", Average(), config.optim, self.task)
        self.monitor.unit = self.task.unit

        folder = CheckpointFolder(self.paths.checkpoints, config.checkpoint.keep)
        self.saver = Saver(folder, config.checkpoint, self.rank)
        self.scaled = ScaledSteps(precision, self.saver)
        # `begin_stage` adds optimizer, schedule and the seat `guard`, which a stage replaces.
        saved: dict[str, Any] = {
            AVERAGE: self.average,
            "precision": precision,
            "best": self.best,
            "data": self.stream,
        }
        if self.stage.changes:
            saved["stages"] = self.stage
        seed = config.dist.random_seed
        self.state = RunState(
            self.task,
            saved,
            rank=self.rank,
            fingerprint=fingerprint(self.rank, built.deciding_data(), seed, self.strategy.about),
            about={"config": run.values, "seed": seed, "lengths": list(lengths)},
        )
        self.begin_stage()
        set_seed(mix(seed, self.rank.rank))  # from here on, each rank draws different random numbers (dropout)

    @property
    def at(self) -> Position:
        """The position of the run, after the last optimizer step."""
        return self.progress.at

    def move_to(self, at: Position) -> None:
        """Set the position of the run, also in the task."""
        self.progress.at = at
        position = TaskPosition(at.step, at.epoch, self.total_steps, self.stream.steps_per_epoch)
        object.__setattr__(self.task, "at", position)  # nn.Module's own way to set it takes 2 us, in each step

    def begin_stage(self) -> None:
        """Build whatever depends on the settings of the current stage."""
        config: RunConfig = self.stage.config
        self.task.zero_grad()
        self.move_to(self.at)
        self.task.loss.set_weights(config.loss)
        self.parameters = [p for p in self.task.parameters() if p.requires_grad]
        groups = self.task.groups()
        self.optimizer = build_optimizer(config.optim, self.task, groups)
        self.average.follow(self.task, self.optimizer)
        self.schedule = self.stage.schedule(self.optimizer)
        self.state.states["optimizer"] = self.optimizer
        self.state.states["schedule"] = self.schedule
        check = step_check(config, self.stream, self.saver, self.state, self.strategy, self.monitor)
        kind = step_class(config, self.optimizer)
        self.optimizer_step = kind(
            config,
            self.task,
            self.strategy,
            self.optimizer,
            self.stream,
            self.rank,
            self.monitor.meter,
            check,
            self.scaled,
        )

    def train(self) -> Outcome:
        """Train from the current position to the end of the run, an early stop or a signal."""
        check_trained(self.task, self.parameters)  # a plugin may have changed what is trainable
        self.task.train()
        with (
            torch.autograd.set_detect_anomaly(self.config.debug.debug_mode),
            self.stop_signals.listening(),
            self.monitor.training(self.at, self.total_steps, self.config.progress.epoch),
            self.saver,
            error_context(lambda: whereabouts(self.stream, self.latest_step, self.at)),
        ):
            self.evaluator.sanity_check(self.val, self.config.best.metric)
            self.evaluator.sanity_check(self.evaluation)
            self.state.layout.begin()  # raises if the sanity checks have made parameters or buffers
            self.run.begin(self.at.step, self.best.best)
            stop_waiting_when(self.stop_signals.stops_waiting)
            if self.config.progress.init_eval and self.saver.saved_step is None:  # not on a resume
                self.evaluate("eval")
            self.run_pending()
            while not self.progress.is_over:
                for step in self.stream.epoch(self.at):
                    self.monitor.clock.batch_ready()
                    before = self.progress.at
                    after = step.global_batch.after
                    self.latest_step = step
                    if self.stage.changes:
                        self.stage.enter_if_due(self)
                    self.schedule.step(before.step - self.stage.start)  # sets the learning rates
                    taken = self.optimizer_step(step, before)  # forward, backward, optimizer: common/step.py
                    if taken and self.average.is_active:
                        self.average.update(self.task, before)
                    self.move_to(after)
                    self.monitor.step_done(after, step.global_batch.samples)
                    due = self.triggers.due(before, after)
                    if due.log:
                        self.log(step)
                    is_best = False
                    if due.validate:  # every process, each its share
                        is_best = self.evaluate("val")
                    if due.evaluate:
                        self.evaluate("eval")
                    is_overdue = self.saver.is_overdue(self.config.progress.save_time)
                    decision = self.stop_signals.sync(is_overdue)  # every process: all decide alike
                    planned = is_best or due.save_latest or due.save_numbered
                    if planned or decision.save:
                        self.save(best=is_best, numbered=due.save_numbered, planned=planned)
                    if due.is_last:
                        self.progress.stop(signal=decision.stop, reason="finished")
                    elif decision.stop:
                        self.progress.stop(signal=decision.stop)
                    if self.progress.is_over:
                        break
                if self.rank.is_single_process and self.stop_signals.signal:  # it came while a batch was waited for
                    self.progress.stop(signal=self.stop_signals.signal)
            return self.finish()

    def log(self, step: Step) -> None:
        """Write a log line and its scalars. Only logged steps wait for the device."""
        self.check_losses()
        if self.saver.saved_step is None:  # not only at the first save, which may be hours away
            self.state.layout.check()
        check_trained(self.task, self.parameters)
        self.saver.check()
        metrics = {}
        if self.config.progress.train_metric:
            metrics = self.evaluator.metrics(step)
        self.monitor.train(self.at, self.optimizer, self.optimizer_step.norm(), metrics, self.scaled.read())

    def check_losses(self) -> None:
        """Raise an error, which ends all processes, if a loss or gradient of this one was not finite.

        Every process must call this.
        """
        bad_step = self.monitor.meter.first_bad_step()  # every process
        if self.optimizer_step.loss_check is not None:
            self.optimizer_step.loss_check.finish(bad_step)
        if self.monitor.meter.bad_here:
            at, name = self.monitor.meter.bad_here
            raise bad_loss(at, self.stream, self.saver, self.rank, name)

    def evaluate(self, split: str) -> bool:
        """Evaluate on the sets of a split, val or eval, with averaged weights if there are any.

        Returns whether the result is the best validation so far. Every process must call this.
        """
        self.check_losses()
        sets = {"val": self.val, "eval": self.evaluation}[split]
        if not sets:
            return False
        self.state.differing_buffers()  # warns of them, before rank 0's replace the others
        try:
            with self.average.applied(self.task):
                share_buffers(self.task, self.rank)  # every process
                result = self.evaluator.run(sets)
        except EvaluationInterrupted as interrupted:
            self.progress.stop(signal=interrupted.number)
            self.progress.pending.add(split)
            logger.info("evaluation on the {} data was interrupted; it will run first after a resume", split)
            return False
        self.run.keep_folder()
        if self.evaluator.gallery:
            self.evaluator.gallery.show(self, split, result)
        self.monitor.clock.reset()
        if split == "val":
            return self.compare(result)
        self.monitor.evaluation("eval", self.at, result)
        if self.rank.is_main:
            with warn_on_oserror("the evaluation's folder"):  # its numbers are in metrics.jsonl too
                name = f"epoch_{self.at.epoch:06d}"
                if self.at.sample:
                    name += f"_step_{self.at.step:08d}"
                self.evaluator.write(self.paths.eval / name, result, step=self.at.step)
        return False

    def compare(self, result: SplitResult) -> bool:
        """Compare a validation with those before it. Returns whether it is the best so far."""
        self.progress.values = result.values
        is_best = self.best.update(result.values, self.at.step)
        metric = self.best.config.metric
        self.monitor.evaluation("val", self.at, result, key=metric, best=is_best)
        value = result.values[metric]
        self.schedule.after_validation(value)
        self.stage.after_validation(value)
        reason = self.best.reason_to_stop()
        if reason:
            logger.info("stopping early: {}", reason)
            self.progress.stop(reason="early_stop")
        return is_best

    def run_pending(self) -> None:
        """Run the evaluations that a signal interrupted, and save if there were any."""
        pending = self.progress.pending
        self.progress.pending = set()
        is_best = "val" in pending and self.evaluate("val")
        if "eval" in pending:
            self.evaluate("eval")
        if pending:
            self.save(best=is_best, planned=is_best)

    def save(self, *, best: bool = False, numbered: bool = False, planned: bool = False) -> None:
        """Save `latest.pt`, and `best.pt` / `step_*.pt` if requested. Every process must call this.

        `planned`: neither a signal nor `save_time` asked for it.
        """
        self.check_losses()
        # A finite loss can have a NaN gradient.
        if max_over_ranks(int(not are_finite(self.parameters)), self.rank):  # every process
            raise not_finite(f"weights are not finite numbers after step {self.at.step}", self.saver)
        if planned and self.optimizer_step.guard is not None:
            self.optimizer_step.guard.saved(self.at.step)
        self.run.keep_folder()
        state = self.state.state_dict(self.at, self.progress.values, self.progress.pending)
        about = {"best": best, "numbered": numbered, "mode": self.best.mode}
        self.monitor.recorder.record("checkpoint", step=self.at.step, epoch=current_epoch(self.at), **about)
        self.monitor.recorder.flush()  # metrics reach the disk before the checkpoint
        self.saver.save(state, best=best, numbered=numbered)
        self.monitor.clock.reset()

    def finish(self) -> Outcome:
        """Save if needed and close the loaders. Returns how training ended."""
        if self.saver.saved_step != self.at.step:
            self.save()
        self.saver.finish(lambda: self.progress.signal or self.stop_signals.signal)
        for data in (self.stream, *self.val, *self.evaluation):
            data.close()
        reason = self.progress.stop_reason
        if self.progress.signal:
            reason = signal.Signals(self.progress.signal).name
        return Outcome(reason, self.at, exit_code(self.progress.signal))

    def restore(self) -> None:
        """Load the run's checkpoint, if it has one. Raises `UserError` if it does not fit."""
        self.state.layout = Layout(self.task)  # again: plugins may have added to the task
        if self.run.checkpoint is None:
            return
        path = self.run.checkpoint.path
        state = dict(self.run.checkpoint.state)
        self.run.checkpoint.state.clear()  # as long as its tensors are in use, its file keeps its space on the disk
        if not self.config.allow_changes:
            refuse_absent(state)
        report = accept_changes(state, self.state, type(self.config), self.config.allow_changes)
        self.stage.resume(self, state)  # first: a stage decides which parameters the optimizer has
        sharded = self.strategy.shard_state(state)
        position, values, pending = self.state.load_state_dict(sharded, path)
        if self.best.is_restarted:
            self.schedule.forget_best()
            self.stage.forget_best()
        self.progress = TrainState(position, values, pending)
        least = 1  # samples that make a step
        if self.stream.is_indexed and self.config.loader.drop_last:
            least = self.stream.samples_per_step
        at = resumed_position(position, self.stream.epoch_size, least)
        self.move_to(at)
        self.saver.saved_step = at.step
        self.saver.folder.source = path
        logger.info("resuming {} at step {}, {} samples into epoch {}", path, at.step, at.sample, at.epoch + 1)
        level = "INFO"
        if NOT_EXACT in report:
            level = "WARNING"
        logger.log(level, "{}", report)
        if self.triggers.is_over(at):
            self.progress.stop_reason = "finished"
        reason = self.best.reason_to_stop()
        if reason:
            logger.info("this run stopped early here: {}; to continue training, change that setting", reason)
            self.progress.stop_reason = "early_stop"
