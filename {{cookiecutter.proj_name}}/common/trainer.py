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

from common.base.context import located
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
from common.failure.failsafe import Requests, exit_code
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
from common.progress import Outcome, Period, Position, ProgressConfig, Rhythm, is_over, resumed_position, total_steps
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
        self.settings, self.progress, self.rank, self.run = settings, settings.progress, rank, run
        self.task, self.stream, self.val, self.evaluation = task, stream, val, evaluation
        self.best, self.monitor = best, monitor
        self.rhythm = Rhythm.of(self.progress)
        self.requests = Requests(rank)

        self.strategy = prepare(model, settings.prepare, settings.dist, precision, rank)
        self.raw_model, self.model, self.precision = self.strategy.module, self.strategy.model, self.strategy.precision
        self.trainable = Trainable(self.raw_model)
        self.evaluator = Evaluator(
            task,
            rank,
            self.precision,
            lockstep_forward=self.strategy.lockstep_forward,
            stop_signal=lambda: self.requests.signal,
        )
        self.optimizer = build_optimizer(settings.optim, self.raw_model)
        self.computes_loss_itself = needs_closure(self.optimizer)  # such as LBFGS
        self.total_steps = total_steps(self.progress, stream.steps_per_epoch)
        self.schedule = build_schedule(
            settings.optim.lr_scheduler, self.optimizer, self.total_steps, stream.steps_per_epoch
        )
        self.clip = Clip(settings.optim)
        self.ema = build_ema(settings.optim.ema, self.raw_model)
        keep_every = Period.parse(settings.checkpoint.keep_every, "step").in_steps(stream.steps_per_epoch)
        folder = CheckpointFolder(run.checkpoints, settings.checkpoint.keep, keep_every)
        self.saver = Saver(folder, settings.checkpoint, rank)

        # What a checkpoint holds besides the model: by name, each able to save and load itself.
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
        self.parameters = [p for p in self.raw_model.parameters() if p.requires_grad]
        self.before = self.at = Position(epoch_size=stream.epoch_size)
        self.step: Step | None = None  # the one being taken, or just done
        self.last = False  # whether the step just done is the last one of the run
        self.values: dict[str, float] = {}  # of the last validation
        self.owed: set[str] = set()  # evaluations of this step that a signal broke off
        self.reason = ""  # why training ends before its time
        self.signal = 0
        self.grad_norm: Tensor | None = None
        self.saved_at = time.monotonic()
        self.saved_step = -1
        warm_up_ddp(self.model, self.trial_loss, rank)

    def train(self) -> Outcome:
        """Train from the current position to the end, to an early stop, or until a signal asks for it."""
        self.trainable.check()  # a plugin may have changed it
        self.raw_model.train()
        slow_and_telling = torch.autograd.set_detect_anomaly(self.settings.debug.debug_mode)
        watched = self.monitor.training(self.at, self.total_steps, self.progress.epoch)
        with slow_and_telling, self.requests.listening(), watched, self.saver.writing(), located(self.where):
            if self.progress.init_eval and self.saved_step < 0:  # a resume is no start
                self.evaluate()
            if self.owed:
                self.catch_up()
            while not (self.over() or self.signal):
                for step in self.stream.epoch(self.at):
                    self.monitor.loaded()
                    self.step = step
                    self.train_step(step)
                    self.before, self.at = self.at, step.global_batch.after
                    self.last = is_over(self.at, self.progress)
                    self.monitor.stepped(self.at, step.global_batch.samples)
                    due = self.rhythm.due(self.before, self.at, last=self.last)
                    if due.log:
                        self.log()
                    if due.pictures:
                        self.show(step)
                    improved = due.validate and self.validate()
                    if due.evaluate:
                        self.evaluate()
                    asked = self.requests.agree(self.save_time_is_up())
                    if improved or due.save_numbered or due.save_latest or asked.save:
                        self.save(best=improved, numbered=due.save_numbered)
                    self.signal = self.signal or asked.stop
                    if self.signal or self.over():
                        break
            return self.end()

    def train_step(self, step: Step) -> None:
        """One optimizer step: forward, loss, backward, clip, step, average."""
        self.schedule.step(self.at.step)
        if self.computes_loss_itself:
            stepped = self.precision.step(self.optimizer, lambda: self.forward_backward(step))
        else:
            self.forward_backward(step)
            stepped = self.precision.step(self.optimizer)
        if stepped:
            self.ema.update(self.raw_model)

    def forward_backward(self, step: Step) -> Tensor:
        """Gradients of the mean loss over the samples of a window, clipped; returns that loss (this process' share)."""
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        last = len(step.batches) - 1
        for number, (batch, weight) in enumerate(zip(step.batches, step.global_batch.weights, strict=True)):
            batch = self.task.prepare_batch(self.precision.cast_batch(batch), self.rank.device)
            with self.strategy.gradient_sync(number == last):
                with self.precision.autocast():
                    output = self.task.forward(self.model, batch)
                    losses = self.task.losses(output, batch)
                loss = losses["sum"] if weight == 1.0 else losses["sum"] * weight
                self.precision.backward(loss)
            self.monitor.meter.add(losses, step.global_batch.sizes[number] if weight else 0)
            total = loss if total is None else total + loss.detach()
        self.precision.unscale(self.optimizer)
        self.grad_norm = self.clip(self.parameters, self.at)
        assert total is not None
        return total

    def trial_loss(self) -> Tensor:
        """A loss that nothing is learnt from."""
        sample = self.stream.sample_batch(full=self.settings.prepare.compile.enabled)
        batch = self.task.prepare_batch(self.precision.cast_batch(sample), self.rank.device)
        with self.precision.autocast():
            return self.task.losses(self.task.forward(self.model, batch), batch)["sum"]

    def where(self) -> str:
        """What is being done, for messages."""
        return whereabouts(self.stream, self.step, self.at)

    def over(self) -> bool:
        """Whether training is done: far enough, or stopped early."""
        return self.last or bool(self.reason)

    def save_time_is_up(self) -> bool:
        """Whether the last save is `progress.save_time` seconds ago."""
        limit = self.progress.save_time
        return limit is not None and 0 < limit < time.monotonic() - self.saved_at

    def log(self) -> None:
        """One line and its scalars. The only place where training waits for the device."""
        if self.progress.epoch_loss > 1 and self.before.epoch % self.progress.epoch_loss:
            return
        self.check_finite()
        self.trainable.look_after_step()
        self.saver.check()
        self.monitor.train(self.at, self.optimizer, self.grad_norm)
        if self.settings.debug.debug_mode:
            log_gradients(self.raw_model, every=self.settings.debug.print_all_grad)

    def check_finite(self) -> None:
        """Stop at a loss that is not a number, before it reaches a checkpoint. Every process must call this."""
        if bad := max_over_ranks(self.monitor.meter.first_bad_step() or 0, self.rank):
            raise bad_loss(bad, self.monitor.meter.bad_here == bad, self.stream, self.saver.folder, self.rank)

    def check_weights(self) -> None:
        """The same for weights: a finite loss can have a gradient that is none. Every process must call this."""
        if max_over_ranks(int(not are_finite(self.parameters)), self.rank):
            raise not_finite(f"weights are not finite numbers after step {self.at.step}", self.saver.folder)

    def show(self, step: Step) -> None:
        """Pictures of the batch that was just trained on, as the model sees it now."""
        if self.before.epoch % self.progress.epoch_save_progress or not (
            self.rank.is_main or self.strategy.lockstep_forward
        ):
            return
        batch = self.task.prepare_batch(self.precision.cast_batch(step.batches[-1]), self.rank.device)
        with torch.no_grad(), evaluation_mode(self.raw_model), self.precision.autocast():
            output = self.task.post_process(self.task.forward(self.raw_model, batch), batch)
            pictures = self.task.pictures(output, batch, self.progress.max_samples_train)
        if self.rank.is_main:
            self.monitor.pictures("train", self.at, pictures)

    def validate(self) -> bool:
        """Measure on the validation data; True when it is the best result so far."""
        if not self.val:
            return False
        self.check_finite()
        pictures = self.progress.max_samples_val if self.progress.save_progress_val else 0
        result = self.measure("val", self.val, pictures)
        if result is None:
            return False
        self.values = result.values
        improved = self.best.update(result.values, self.at.step)
        self.monitor.evaluation("val", self.at, result, best=improved)
        value = result.values.get(self.best.config.metric)
        self.schedule.after_validation(value)
        if reason := self.best.reason_to_stop(value):
            logger.info("stopping early: {}", reason)
            self.reason = "early_stop"
        return improved

    def evaluate(self) -> None:
        """Measure on the evaluation data, and leave the numbers and pictures in the run's eval folder."""
        if not self.evaluation:
            return
        result = self.measure("eval", self.evaluation, self.progress.max_samples_eval)
        if result is None:
            return
        self.monitor.evaluation("eval", self.at, result)
        if self.rank.is_main:
            with warn_on_oserror("the evaluation's folder"):  # its numbers are in metrics.jsonl too
                write_evaluation(self.run.eval / f"epoch_{self.at.epoch:06d}", result, step=self.at.step)

    def measure(self, split: str, data: Sequence[EvaluationLoader], max_pictures: int) -> SplitResult | None:
        """Evaluate the averaged weights, or the weights themselves where none are averaged.

        None when a signal broke it off; the split is owed then, and evaluated first when the run goes on.
        """
        result = None
        with self.ema.applied(self.raw_model):
            # Each rank's batch norm has seen other samples, and so has its average: all evaluate rank 0's.
            share_buffers(self.raw_model, self.rank)
            try:
                result = self.evaluator.run(self.raw_model, data, max_pictures=max_pictures if self.rank.is_main else 0)
            except EvaluationInterrupted as broken:
                self.signal = broken.number
                self.owed.add(split)
                logger.info("the {} evaluation is broken off, and done when the run goes on", split)
        self.monitor.resumed_training()
        return result

    def catch_up(self) -> None:
        """Do the evaluations that a signal broke off, and what follows from them."""
        owed, self.owed = self.owed, set()
        improved = "val" in owed and self.validate()
        if "eval" in owed:
            self.evaluate()
        self.save(best=improved)

    def save(self, *, best: bool = False, numbered: bool = False) -> None:
        """Save: `latest.pt`, and `best.pt` / `step_*.pt` where asked. Every process must call this."""
        self.check_finite()
        self.check_weights()
        state = self.state.state_dict(self.at, self.values, self.owed)
        if self.rank.is_main:
            # Before the checkpoint: what it says was measured is on the disk when it is.
            self.monitor.saving(self.at, best=best, numbered=numbered)
        self.saver.save(state, step=self.at.step, best=best, numbered=numbered)
        self.monitor.resumed_training()
        self.saved_at, self.saved_step = time.monotonic(), self.at.step

    def end(self) -> Outcome:
        """The last save, and how it went."""
        if self.saved_step != self.at.step:
            self.save()
        self.saver.finish()
        self.stream.close()
        for data in (*self.val, *self.evaluation):
            data.close()
        name = signal.Signals(self.signal).name if self.signal else self.reason or "finished"
        return Outcome(name, self.at, self.values, self.saver.folder.latest, exit_code(self.signal))

    def load_weights(self, state: Mapping[str, Any], source: Path) -> None:
        """Start from the weights of a checkpoint, and nothing else of it."""
        self.state.load_weights(self.strategy.shard_state(state, source), source)
        self.ema.reset(self.raw_model)

    def load_state_dict(self, state: Mapping[str, Any], source: Path) -> None:
        """Go on where the checkpoint stopped."""
        at, self.values, self.owed = self.state.load_state_dict(self.strategy.shard_state(state, source), source)
        self.at = self.before = resumed_position(at, self.stream.epoch_size)
        self.saved_step, self.last = self.at.step, is_over(self.at, self.progress)
        if reason := self.best.reason_to_stop(self.values.get(self.best.config.metric)):
            logger.info("this run stopped early here: {}; to train on, change that setting", reason)
            self.reason = "early_stop"
