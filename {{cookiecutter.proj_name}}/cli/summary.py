"""The first and last lines of a run's log: its parts and intervals; its results."""

from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any

from loguru import logger

from common.base.files import PROJECT
from common.base.text import label, number
from common.config.problem import shown_path
from common.config.registry import (
    DATASET_REGISTRY,
    LOSS_REGISTRY,
    METRIC_REGISTRY,
    MODEL_REGISTRY,
    REGISTRIES,
    TASK_REGISTRY,
)
from common.data.sections import sets_of
from common.data.view import is_map_style
from common.monitor.writer import drop_duplicate_loss
from common.progress import Interval, Outcome
from common.run_context import RunContext
from common.trainer import Trainer
from custom.config import Config

_MOST_VALUES = 5


def log_start(config: Config, trainer: Trainer, run: RunContext) -> None:
    """Log the chosen parts, the location of their code, and the intervals."""
    parameters = list(trainer.task.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    logger.info("{}, seed {}, run folder {}", run.rank, run.seed, run.paths.root)
    chosen = {TASK_REGISTRY: {config.task["type"]: None}, MODEL_REGISTRY: {config.model["type"]: None}}
    for registry, sections in {**chosen, LOSS_REGISTRY: config.loss, METRIC_REGISTRY: config.metric}.items():
        for key, part in (sections or {}).items():
            logger.info("{} {} {}", registry.kind, key, registry.where((part or {}).get("type") or key))
    size = f"{total:,} parameters, {trainable:,} trainable"
    logger.info("{}", size)
    trainer.monitor.recorder.begin_with("run/model", f"{size}\n{trainer.task.model}")
    log_data("train", config.dataset.train, trainer.stream.dataset)
    for loader in (*trainer.val, *trainer.evaluation):
        part = sets_of(getattr(config.dataset, loader.split))[loader.name]
        log_data(label(loader.split, loader.name), part, loader.dataset)
    for line in (line for registry in REGISTRIES for line in registry.left_out):
        if "library/" not in line.partition(" ")[0]:  # of a ready-made part, only who names it needs to know
            logger.warning("{}", line)
    if trainer.progress.stop_reason == "finished":
        text = "this run finished already, at epoch {}, step {}; to train longer, raise progress.epoch (or max_steps)"
        logger.warning(text, trainer.at.epoch, trainer.at.step)
    steps = trainer.stream.steps_per_epoch
    logger.info("{} steps per epoch; intervals:\n{}", steps or "unknown", interval_table(trainer))


def interval_table(trainer: Trainer) -> str:
    """List the actions and their intervals, one per line, in the order of the loop."""
    names = ("log line, scalars", "validation", "evaluation", "latest.pt", "step_*.pt")
    sets = {"validation": trainer.val, "evaluation": trainer.evaluation}
    missing = {name: "no data" for name, loaders in sets.items() if not loaders}
    return "\n".join(
        f"  {name:<18} {f'never ({missing[name]})' if name in missing else describe_interval(interval)}"
        for name, interval in zip(names, trainer.triggers.intervals.values(), strict=True)
    )


def describe_interval(interval: Interval) -> str:
    """Write an interval in words, such as `every 0.5 epochs`."""
    if not interval:
        return "never"
    amount = interval.amount.numerator if interval.amount.denominator == 1 else float(interval.amount)
    return f"every {interval.unit}" if amount == 1 else f"every {amount} {interval.unit}s"


def log_data(name: str, section: Mapping[str, Any], dataset: Any) -> None:
    """Log a dataset: its type, the location of its code, its size."""
    kind = section["type"]
    has_length = is_map_style(dataset) or getattr(dataset, "reads_in_step", False)
    count = f"{len(dataset):,} samples" if has_length else "unknown length"
    logger.info("{} data {} {} ({})", name, kind, DATASET_REGISTRY.where(kind), count)


def log_end(trainer: Trainer, outcome: Outcome | None) -> None:
    """Log the results of a run.

    `outcome`: None after a second Ctrl-C.
    """
    if not trainer.rank.is_main:
        return
    logger.info("{}", summary(trainer, outcome))


def summary(trainer: Trainer, outcome: Outcome | None) -> str:
    """Return the best and the last values, and how to resume a stopped run. `outcome`: None if it ended unsaved."""
    best, saved = trainer.best.best, trainer.saver.saved_step
    time = timedelta(seconds=round(perf_counter() - trainer.monitor.clock.started))
    rows = []
    if best is not None:
        rows.append(("best", f"{values(best.values, trainer)} (best.pt: step {best.step})"))
    if last := trainer.progress.values:
        rows.append(("last", values(last, trainer) + f" (latest.pt: step {saved})" * bool(saved)))
    if outcome is None or outcome.exit_code:
        again = trainer.paths.resume_command(str(PROJECT / "train.py"))
        rows.append(("resume", again or "nothing was saved"))
    head = f"{shown_path(trainer.paths.root)}, trained for {time}"
    return "\n".join([head, *(f"  {name:<8} {text}" for name, text in rows)])


def values(measured: Mapping[str, float], trainer: Trainer) -> str:
    """Format measured values: first that of `best.metric`, then the first of the others."""
    key = trainer.best.config.metric
    names = sorted(drop_duplicate_loss(measured), key=lambda name: name != key)
    shown = "  ".join(f"{name} {number(measured[name]).strip()}" for name in names[:_MOST_VALUES])
    return shown + "  …" * (len(names) > _MOST_VALUES)
