"""The loop. Read `Trainer.train`: everything that happens during a run is called there by name, in order."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from common.base.context import error_context
from common.base.files import warn_on_oserror
from common.checkpoint import CheckpointConfig, CheckpointFolder, Saver
from common.checkpoint.finite import are_finite, bad_loss, not_finite
from common.checkpoint.guarantee import fingerprint
from common.checkpoint.state import RunState
from common.data.loader import BatchStream, EvaluationLoader, Step
from common.data.whereabouts import whereabouts
from common.distributed import DistConfig, Rank, max_over_ranks, share_buffers
from common.evaluation.best import BestTracker
from common.evaluation.evaluator import EvaluationInterrupted, Evaluator, SplitResult, evaluation_mode, write_evaluation
from common.evaluation.loss import Losses
from common.failure.failsafe import StopSignals, exit_code
from common.model import PrepareConfig, prepare
from common.model.freeze import Trainable
from common.model.warm_up import warm_up_ddp
from common.monitor import Monitor
from common.optim import (
    Clip,
    OptimConfig,
    build_ema,
    build_optimizer,
    build_schedule,
    needs_closure,
)
from common.optim.gradients import DebugConfig, log_gradients
from common.optim.precision import Precision
from common.progress import (
    Interval,
    Outcome,
    Position,
    ProgressConfig,
    TrainState,
    Triggers,
    resumed_position,
    total_steps,
)
from common.run.paths import RunPaths
from common.task import Task


@dataclass(frozen=True)
class Settings:
    """The sections of the config that the trainer itself reads."""

    progress: ProgressConfig
    optim: OptimConfig
    prepare: PrepareConfig
    dist: DistConfig
    debug: DebugConfig
    checkpoint: CheckpointConfig


class Trainer:
    """Trains one model by one task.

    Args:
        model: bare, on the CPU; the trainer prepares it, see `common.model`.
        val: the sets for choosing the best checkpoint; mostly one, or none.
        evaluation: the sets for the reported numbers, or none.
        about: plain values (config, versions) that every checkpoint carries along.

    Attributes:
        progress: where the run is; saved in every checkpoint.
        state: everything that a checkpoint holds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        task: Task,
        model: nn.Module,
        stream: BatchStream,
        val: Sequence[EvaluationLoader],
        evaluation: Sequence[EvaluationLoader],
        best: BestTracker,
        precision: Precision,
        monitor: Monitor,
        run: RunPaths,
        rank: Rank,
        seed: int,
        about: Mapping[str, Any],
    ) -> None:
        self.settings, self.config, self.rank, self.run = settings, settings.progress, rank, run
        self.task, self.stream, self.val, self.evaluation = task, stream, val, evaluation
        self.best, self.monitor = best, monitor
        self.triggers = Triggers(self.config, stream.samples_per_step)
        self.stop_signals = StopSignals(rank)

        self.strategy = prepare(model, settings.prepare, settings.dist, precision, rank)
        self.raw_model, self.model, self.precision = self.strategy.module, self.strategy.model, self.strategy.precision
        self.trainable = Trainable(self.raw_model)
        self.parameters = [p for p in self.raw_model.parameters() if p.requires_grad]
        self.evaluator = Evaluator(
            task,
            rank,
            self.precision,
            lockstep_forward=self.strategy.lockstep_forward,
            stop_signal=lambda: self.stop_signals.signal,
        )
        self.optimizer = build_optimizer(settings.optim, self.raw_model)
        self.computes_loss_itself = needs_closure(self.optimizer)  # such as LBFGS
        self.total_steps = total_steps(self.config, stream.steps_per_epoch)
        self.schedule = build_schedule(
            settings.optim.lr_scheduler, self.optimizer, self.total_steps, stream.steps_per_epoch
        )
        self.clip = Clip(settings.optim)
        self.ema = build_ema(settings.optim.ema, self.raw_model)
        keep_every = Interval.parse(settings.checkpoint.keep_every, "step").in_steps(stream.steps_per_epoch)
        folder = CheckpointFolder(run.checkpoints, settings.checkpoint.keep, keep_every)
        self.saver = Saver(folder, settings.checkpoint, rank)

        self.progress = TrainState(Position(epoch_size=stream.epoch_size))
        self.state = RunState(
            self.raw_model,
            {
                "ema": self.ema,
                "optimizer": self.optimizer,
                "schedule": self.schedule,
                "precision": self.precision,
                "best": best,
                "data": stream,
            },
            rank=rank,
            fingerprint=fingerprint(rank, stream, seed, self.strategy.about),
            about=about,
        )
        self.register_state = self.state.register
        self.step: Step | None = None  # the latest one
        self.grad_norm: Tensor | None = None  # of that step
        self.stop_reason = ""  # finished, early_stop; empty while there is more to train
        self.signal = 0  # that stopped training
        self.saved_step: int | None = None  # of the newest checkpoint
        self.saved_at = time.monotonic()
        warm_up_ddp(self.model, self.trial_loss, rank)

    @property
    def at(self) -> Position:
        """Where the run is: after the last optimizer step."""
        return self.progress.at

    def train(self) -> Outcome:
        """Train from the current position to the end, to an early stop, or until a signal asks for it."""
        self.trainable.check()  # a plugin may have changed it
        self.raw_model.train()
        with (
            torch.autograd.set_detect_anomaly(self.settings.debug.debug_mode),
            self.stop_signals.listening(),
            self.monitor.training(self.at, self.total_steps, self.config.epoch),
            self.saver.writing(),
            error_context(self.describe_position),
        ):
            if self.config.init_eval and self.saved_step is None:  # not on a resume
                self.evaluate()
            self.run_pending()
            while not (self.stop_reason or self.signal):
                for step in self.stream.epoch(self.at):
                    self.monitor.batch_ready()
                    before = self.at
                    self.train_step(step)
                    self.monitor.step_done(self.at, step.global_batch.samples)
                    due = self.triggers.due(before, self.at)
                    if due.log:
                        self.log()
                    if due.pictures:
                        self.log_pictures(step)
                    is_best = due.validate and self.validate()
                    if due.evaluate:
                        self.evaluate()
                    decision = self.stop_signals.sync(self.save_time_is_up())
                    if is_best or due.save_latest or due.save_numbered or decision.save:
                        self.save(best=is_best, numbered=due.save_numbered)
                    self.signal = self.signal or decision.stop
                    if due.is_last:
                        self.stop_reason = self.stop_reason or "finished"
                    if self.stop_reason or self.signal:
                        break
            return self.finish()

    def train_step(self, step: Step) -> None:
        """One optimizer step: forward, loss, backward, clip, step, average."""
        self.step = step
        self.schedule.step(self.at.step)
        if self.computes_loss_itself:
            weights_changed = self.precision.step(self.optimizer, lambda: self.forward_backward(step))
        else:
            self.forward_backward(step)
            weights_changed = self.precision.step(self.optimizer)
        if weights_changed:
            self.ema.update(self.raw_model)
        self.progress.at = step.global_batch.after

    def forward_backward(self, step: Step) -> Tensor:
        """Clipped gradients of the mean loss over the step's samples; returns that loss (this process' share)."""
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        last = len(step.batches) - 1
        for number, (batch, weight) in enumerate(zip(step.batches, step.global_batch.weights, strict=True)):
            with self.strategy.gradient_sync(number == last):
                losses = self.losses(batch)
                loss = losses["loss"] if weight == 1.0 else losses["loss"] * weight
                self.precision.backward(loss)
            self.monitor.meter.add(self.at.step + 1, losses, step.global_batch.sizes[number] if weight else 0)
            total = loss if total is None else total + loss.detach()
        self.precision.unscale(self.optimizer)
        self.grad_norm = self.clip(self.parameters, self.at)
        assert total is not None
        return total

    def losses(self, batch: Any) -> Losses:
        """Forward pass and losses of a loaded batch."""
        batch = self.task.prepare_batch(self.precision.cast_batch(batch), self.rank.device)
        with self.precision.autocast():
            return self.task.losses(self.task.forward(self.model, batch), batch)

    def trial_loss(self) -> Tensor:
        """A loss to try the model with, before training."""
        sum_: Tensor = self.losses(self.stream.sample_batch(full=self.settings.prepare.compile.enabled))["loss"]
        return sum_

    def describe_position(self) -> str:
        """Which step and samples are being worked on, for error messages."""
        return whereabouts(self.stream, self.step, self.at)

    def save_time_is_up(self) -> bool:
        """Whether the last save is `progress.save_time` seconds ago."""
        limit = self.config.save_time
        return limit is not None and 0 < limit < time.monotonic() - self.saved_at

    def log(self) -> None:
        """One line and its scalars. The only place where training waits for the device."""
        self.check_losses()
        self.trainable.look_after_step()
        self.saver.check()
        self.monitor.train(self.at, self.optimizer, self.grad_norm)
        if self.settings.debug.debug_mode:
            log_gradients(self.raw_model, every=self.settings.debug.print_all_grad)

    def check_losses(self) -> None:
        """Stop at a loss that is not a number, before it reaches a checkpoint. Every process must call this."""
        if bad := max_over_ranks(self.monitor.meter.first_bad_step() or 0, self.rank):
            raise bad_loss(bad, self.monitor.meter.bad_here == bad, self.stream, self.saver.folder, self.rank)

    def check_weights(self) -> None:
        """The same for weights: a finite loss can have a gradient that is not. Every process must call this."""
        if max_over_ranks(int(not are_finite(self.parameters)), self.rank):
            raise not_finite(f"weights are not finite numbers after step {self.at.step}", self.saver.folder)

    def log_pictures(self, step: Step) -> None:
        """Pictures of the batch that was just trained on, as the model sees it now."""
        if not (self.rank.is_main or self.strategy.lockstep_forward):
            return
        batch = self.task.prepare_batch(self.precision.cast_batch(step.batches[-1]), self.rank.device)
        with torch.no_grad(), evaluation_mode(self.raw_model), self.precision.autocast():
            output = self.task.post_process(self.task.forward(self.raw_model, batch), batch)
            pictures = self.task.pictures(output, batch, self.config.max_samples_train)
        if self.rank.is_main:
            self.monitor.pictures("train", self.at, pictures)

    def validate(self) -> bool:
        """Evaluate on the validation data; True when it is the best result so far."""
        self.check_losses()
        pictures = self.config.max_samples_val if self.config.save_progress_val else 0
        result = self.run_evaluation("val", self.val, pictures)
        if result is None:
            return False
        self.progress.values = result.values
        is_best = self.best.update(result.values, self.at.step)
        self.monitor.evaluation("val", self.at, result, best=is_best)
        value = result.values.get(self.best.config.metric)
        self.schedule.after_validation(value)
        if reason := self.best.reason_to_stop(value):
            logger.info("stopping early: {}", reason)
            self.stop_reason = "early_stop"
        return is_best

    def evaluate(self) -> None:
        """Evaluate on the evaluation data, and leave the numbers and pictures in the run's eval folder."""
        result = self.run_evaluation("eval", self.evaluation, self.config.max_samples_eval)
        if result is None:
            return
        self.monitor.evaluation("eval", self.at, result)
        if self.rank.is_main:
            with warn_on_oserror("the evaluation's folder"):  # its numbers are in metrics.jsonl too
                write_evaluation(self.run.eval / f"epoch_{self.at.epoch:06d}", result, step=self.at.step)

    def run_evaluation(self, split: str, sets: Sequence[EvaluationLoader], max_pictures: int) -> SplitResult | None:
        """Evaluate the averaged weights, or the weights themselves where none are averaged.

        None without data, and when a signal interrupts it: then it is pending, and the first thing after a resume.
        """
        if not sets:
            return None
        result = None
        with self.ema.applied(self.raw_model):
            # Each rank's batch norm has seen other samples, and so has its average: all evaluate rank 0's.
            share_buffers(self.raw_model, self.rank)
            try:
                result = self.evaluator.run(self.raw_model, sets, max_pictures=max_pictures if self.rank.is_main else 0)
            except EvaluationInterrupted as interrupted:
                self.signal = interrupted.number
                self.progress.pending.add(split)
                logger.info("the {} evaluation is interrupted; it will be run again first on resume", split)
        self.monitor.reset_timer()
        return result

    def run_pending(self) -> None:
        """Run the evaluations that a signal interrupted, and save what follows from them."""
        pending, self.progress.pending = self.progress.pending, set()
        is_best = "val" in pending and self.validate()
        if "eval" in pending:
            self.evaluate()
        if pending:
            self.save(best=is_best)

    def save(self, *, best: bool = False, numbered: bool = False) -> None:
        """Save: `latest.pt`, and `best.pt` / `step_*.pt` where asked. Every process must call this."""
        self.check_losses()
        self.check_weights()
        state = self.state.state_dict(self.at, self.progress.values, self.progress.pending)
        if self.rank.is_main:  # first the measurements, then the checkpoint that follows from them
            self.monitor.saving(self.at, best=best, numbered=numbered)
        self.saver.save(state, step=self.at.step, best=best, numbered=numbered)
        self.monitor.reset_timer()
        self.saved_at, self.saved_step = time.monotonic(), self.at.step

    def finish(self) -> Outcome:
        """The last save, and how training ended."""
        if self.saved_step != self.at.step:
            self.save()
        self.saver.finish()
        self.stream.close()
        for data in (*self.val, *self.evaluation):
            data.close()
        reason = signal.Signals(self.signal).name if self.signal else self.stop_reason
        return Outcome(reason, self.at, self.progress.values, self.saver.folder.latest, exit_code(self.signal))

    def load_weights(self, state: Mapping[str, Any], source: Path) -> None:
        """Start from the weights of a checkpoint, and nothing else of it."""
        self.state.load_weights(self.strategy.shard_state(state, source), source)
        self.ema.reset(self.raw_model)

    def load_state_dict(self, state: Mapping[str, Any], source: Path) -> None:
        """Continue where the checkpoint stopped."""
        self.progress = TrainState(*self.state.load_state_dict(self.strategy.shard_state(state, source), source))
        self.progress.at = resumed_position(self.at, self.stream.epoch_size)
        self.saved_step = self.at.step
        if self.triggers.is_over(self.at):
            self.stop_reason = "finished"
        if reason := self.best.reason_to_stop(self.progress.values.get(self.best.config.metric)):
            logger.info("this run stopped early here: {}; to train on, change that setting", reason)
            self.stop_reason = "early_stop"
