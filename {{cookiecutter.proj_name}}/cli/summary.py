"""The first and last lines of a run's log: its parts and intervals; its results."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from time import perf_counter
from typing import Any

from loguru import logger

from common.base.errors import UserError
from common.base.files import PROJECT
from common.base.text import label, number
from common.checkpoint.file import step_of
from common.config.problem import shown_path
from common.config.registry import (
    DATASET_REGISTRY,
    LOSS_REGISTRY,
    METRIC_REGISTRY,
    MODEL_REGISTRY,
    REGISTRIES,
    TASK_REGISTRY,
    file_of,
)
from common.data.sections import sets_of
from common.data.view import is_map_style
from common.monitor.writer import drop_duplicate_loss
from common.progress import Outcome
from common.trainer import Trainer


def log_start(trainer: Trainer) -> None:
    """Log the chosen parts, the location of their code, and the intervals."""
    config = trainer.config
    parameters = list(trainer.task.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    logger.info("{}, seed {}, run folder {}", trainer.rank, config.dist.random_seed, trainer.paths.root)
    chosen: Any = {
        TASK_REGISTRY: {config.task["type"]: None},
        MODEL_REGISTRY: {config.model["type"]: None},
        LOSS_REGISTRY: config.loss or {},
        METRIC_REGISTRY: config.metric,
    }
    for registry, sections in chosen.items():
        for name, section in sections.items():
            kind = (section or {}).get("type", name)
            logger.info("{} {} {}", registry.kind, name, file_of(registry.get(kind)))
    size = f"{total:,} parameters, {trainable:,} trainable"
    logger.info("{}", size)
    trainer.monitor.texts["run/model"] = f"{size}\n{trainer.task.model}"
    log_data("train", config.dataset.train, trainer.stream.dataset)
    for loader in (*trainer.val, *trainer.evaluation):
        part = sets_of(getattr(config.dataset, loader.split))[loader.name]
        log_data(label(loader.split, loader.name), part, loader.dataset)
    for registry in REGISTRIES:
        for line in registry.left_out:
            if "library/" not in line:  # of a ready-made part, only who names it needs to know
                logger.warning("{}", line)
    if trainer.progress.stop_reason == "finished":
        text = "this run finished already, at epoch {}, step {}; to train longer, raise progress.epoch (or max_steps)"
        logger.warning(text, trainer.at.epoch, trainer.at.step)
    steps = trainer.stream.steps_per_epoch
    logger.info("{} steps per epoch; intervals:\n{}", steps or "unknown", interval_table(trainer))


def interval_table(trainer: Trainer) -> str:
    """List the actions and their intervals, one per line, in the order of the loop."""
    names = ("log line, scalars", "validation", "evaluation", "latest.pt", "step_*.pt")
    lines = []
    for name, interval in zip(names, trainer.triggers.intervals, strict=True):
        text = "never"
        if interval:
            text = f"every {interval.numerator / interval.denominator:g} {interval.unit}"
            if interval.numerator != interval.denominator:
                text += "s"
        if (name == "validation" and not trainer.val) or (name == "evaluation" and not trainer.evaluation):
            text = "no data"
        lines.append(f"  {name:<18} {text}")
    return "\n".join(lines)


def log_data(name: str, section: Mapping[str, Any], dataset: Any) -> None:
    """Log a dataset: its type, the location of its code, its size."""
    kind = section["type"]
    count = "unknown length"
    if is_map_style(dataset) or getattr(dataset, "reads_in_step", False):
        count = f"{len(dataset):,} samples"
    logger.info("{} data {} {} ({})", name, kind, file_of(DATASET_REGISTRY.get(kind)), count)


def log_end(trainer: Trainer, outcome: Outcome | None) -> None:
    """Log the best and the last values, and how to resume a stopped run. `outcome`: None after a second Ctrl-C."""
    if not trainer.rank.is_main:
        return
    time = timedelta(seconds=round(perf_counter() - trainer.monitor.clock.started))
    lines = [f"{shown_path(trainer.paths.root)}, trained for {time}"]
    best = trainer.best.best
    if best is not None:
        file = ""
        with suppress(UserError):  # it cannot be read
            if step_of(trainer.saver.folder.best) == best.step:
                file = "best.pt: "
        lines.append(f"best     {values(best.values, trainer)} ({file}step {best.step})")
    last = trainer.progress.values
    saved = trainer.saver.saved_step
    if last and saved:
        lines.append(f"last     {values(last, trainer)} (last validation; latest.pt: step {saved})")
    if outcome is None or outcome.exit_code:
        again = trainer.paths.resume_command(str(PROJECT / "train.py"))
        lines.append(f"resume   {again or 'nothing was saved'}")
    logger.info("{}", "\n  ".join(lines))


def values(measured: Mapping[str, float], trainer: Trainer) -> str:
    """Format measured values: first that of `best.metric`."""
    key = trainer.best.config.metric
    names = sorted(drop_duplicate_loss(measured), key=lambda name: name != key)
    return "  ".join(f"{name} {number(measured[name]).strip()}" for name in names)
