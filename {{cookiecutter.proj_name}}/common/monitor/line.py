"""Format of the log lines. Widths are fixed where possible, so numbers stay in the same place from line to line.

A terminal shows as much of a line as fits, so the most important columns come first.
"""

from collections.abc import Mapping
from datetime import timedelta

from common.base.text import number
from common.monitor.meter import Reading
from common.monitor.writer import drop_duplicate_loss
from common.progress import Position

_MOST_RATES = 4  # shown one by one


def train_line(
    where: str,
    losses: Reading,
    rates: Mapping[str, float],
    others: Mapping[str, float],
    speed: Mapping[str, float],
    eta: float | None,
    skipped: tuple[int, int],
) -> str:
    """Return one line about training. A loss is shown as `raw (smooth)`.

    Args:
        where: from `position`.
        rates: learning rates: `lr`, or `lr_<name>` of each parameter group.
        others: metrics of the step, and the norm of the gradients.
        speed: seconds of a step, share of it waiting for data, samples per second, bytes of memory, then any others.
        eta: seconds to the end, if known.
        skipped: steps that loss scaling skipped, and of how many, since the last line.
    """
    shown = drop_duplicate_loss(losses.raw)
    columns = [
        where,
        "  ".join(f"{name} {number(value)} ({number(losses.smooth[name])})" for name, value in shown.items()),
        rates_text(rates),
        _pairs(others),
    ]
    if skipped[0]:
        columns.append(f"skipped {skipped[0]} of {skipped[1]}")
    if eta is not None:
        columns.append(f"ETA {timedelta(seconds=round(eta))}")
    step, data, samples, memory, *_ = speed.values()
    more = list(speed.items())[4:]
    columns += [
        f"{step * 1000:6.1f} ms/step data {data:4.0%} {samples:6.0f}/s",
        "  ".join(f"{name.replace('_per_second', '/s')} {value:.4g}" for name, value in more),
        f"mem {memory / 2**20:.0f} MB",
    ]
    return " | ".join(filter(None, columns))


def evaluation_line(
    split: str,
    where: str,
    values: Mapping[str, float],
    samples: int,
    *,
    best: bool,
) -> str:
    """Return one line about a pass over `samples` samples of evaluation data.

    Args:
        where: from `position`. The name of the split replaces its "epoch", so that losses are below those of training.
    """
    line = f"{split:<5}{where.removeprefix('epoch')} | {_pairs(values)} | {samples} samples"
    if best:
        line += " | best so far"
    return line


def position(at: Position, total_steps: int | None, total_epochs: int | None) -> str:
    """Epoch and step, and those of the whole run, where known."""
    return f"epoch {_of(current_epoch(at), total_epochs)} step {_of(at.step, total_steps)}"


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


def _pairs(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


def rates_text(rates: Mapping[str, float]) -> str:
    """Return the rates by name, or their range where there are many."""
    if len(rates) > _MOST_RATES:
        return f"lr {min(rates.values()):.2e}..{max(rates.values()):.2e} ({len(rates)} groups)"
    return "  ".join(f"{name} {rate:.2e}" for name, rate in rates.items())
