"""Format of the log lines. Widths are fixed where possible, so numbers stay in the same place from line to line.

A terminal shows as much of a line as fits, so the most important columns come first.
"""

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType

from common.base.text import number
from common.monitor.clock import Timing
from common.monitor.meter import Reading
from common.monitor.writer import drop_duplicate_loss
from common.progress import Position

_MOST_RATES = 4  # shown one by one


def train_line(
    at: Position,
    totals: tuple[int | None, int | None],
    rates: Mapping[str, float],
    losses: Reading,
    more: Mapping[str, float],
    timing: Timing,
    memory: int,
    compared: Mapping[str, float] = MappingProxyType({}),
    skipped: tuple[int, int] = (0, 0),
) -> str:
    """Return one line about training. A loss is shown as `raw (smooth)`.

    Args:
        at: position after the step.
        totals: optimizer steps and epochs of the whole run, where known.
        rates: learning rates: `lr`, or `lr_<name>` of each parameter group.
        more: metrics of the step, and the norm of the gradients as `grad_norm`, where known.
        memory: bytes.
        compared: further numbers of the speed.
        skipped: steps that loss scaling skipped, and of how many.
    """
    raw = drop_duplicate_loss(losses.raw)
    columns = [
        position(at, totals),
        "  ".join(f"{name} {number(value)} ({number(losses.smooth[name])})" for name, value in raw.items()),
        f"lr {learning_rates(rates)}",
        "  ".join(f"{name.removesuffix('_norm')} {number(value)}" for name, value in more.items()),
        f"skipped {skipped[0]} of {skipped[1]}" if skipped[0] else "",
        "" if timing.eta is None else f"ETA {timedelta(seconds=round(timing.eta))}",
        f"{timing.step * 1000:6.1f} ms/step data {timing.data:4.0%} {timing.rate:6.0f}/s",
        "  ".join(f"{name.replace('_per_second', '/s')} {value:.4g}" for name, value in compared.items()),
        f"mem {memory / 2**20:.0f} MB",
    ]
    return " | ".join(filter(None, columns))


def evaluation_line(
    split: str,
    where: str,
    values: Mapping[str, float],
    samples: int,
    *,
    best: bool = False,
) -> str:
    """Return one line about a pass over `samples` samples of evaluation data.

    Args:
        where: from `position`. The name of the split replaces its "epoch", so that losses are below those of training.
    """
    shown = "  ".join(f"{name} {number(value)}" for name, value in values.items())
    line = f"{split:<5}{where.removeprefix('epoch')} | {shown} | {samples} samples"
    if best:
        line += " | best so far"
    return line


def position(at: Position, totals: tuple[int | None, int | None]) -> str:
    """Epoch and step; `totals`: steps and epochs of the run, where known."""
    return f"epoch {_of(current_epoch(at), totals[1])} step {_of(at.step, totals[0])}"


def current_epoch(at: Position) -> int:
    """Return the epoch that the last step belonged to, counted from 1."""
    if at.sample == 0 and at.epoch > 0:
        return at.epoch
    return at.epoch + 1


def _of(value: int, total: int | None) -> str:
    """`12/300`, the number padded to the total's width."""
    if total is None:
        return str(value)
    return f"{value:>{len(str(total))}}/{total}"


def learning_rates(rates: Mapping[str, float]) -> str:
    """Return the rate, or those of all groups by name, or their range where there are many."""
    if len(rates) > _MOST_RATES:
        return f"{min(rates.values()):.2e}..{max(rates.values()):.2e} ({len(rates)} groups)"
    return "  ".join(f"{name.removeprefix('lr').removeprefix('_')} {rate:.2e}".strip() for name, rate in rates.items())
