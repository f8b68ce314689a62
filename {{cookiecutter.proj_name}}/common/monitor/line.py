"""Format of the log lines. Widths are fixed where possible, so numbers stay in the same place from line to line."""

import math
from collections.abc import Mapping
from datetime import timedelta

from common.monitor.clock import Timing
from common.monitor.meter import Reading
from common.progress import Position


def train_line(
    at: Position,
    totals: tuple[int | None, int | None],
    rates: Mapping[str, float],
    losses: Reading,
    more: Mapping[str, float],
    timing: Timing,
    memory: int,
) -> str:
    """One line about training. A loss is shown as `raw (smooth)`.

    Args:
        at: position after the step.
        totals: optimizer steps and epochs of the whole run, where known.
        rates: learning rates: `lr`, or `lr_<name>` of each group of parameters.
        more: metrics of the step, and the norm of the gradients, where known.
        memory: bytes.
    """
    shown = {name: f"{name} {number(value)} ({number(losses.smooth[name])})" for name, value in losses.raw.items()}
    if list(losses.raw.values())[1:] == [losses.raw.get("loss")]:  # a single loss is the sum already
        shown = {"loss": shown["loss"]}
    columns = [
        f"epoch {counted(current_epoch(at), totals[1])} step {counted(at.step, totals[0])}",
        f"lr {learning_rates(rates)}",
        "  ".join(shown.values()),
        "  ".join(f"{'grad' if name == 'grad_norm' else name} {number(value)}" for name, value in more.items()),
        f"{timing.step * 1000:6.1f} ms/step data {timing.data:4.0%} {timing.rate:6.0f}/s",
        "" if timing.eta is None else f"ETA {timedelta(seconds=round(timing.eta))}",
        f"mem {memory / 2**20:.0f} MB",
    ]
    return " | ".join(column for column in columns if column)


def evaluation_line(split: str, at: Position, values: Mapping[str, float], samples: int, *, best: bool = False) -> str:
    """One line about a pass over `samples` samples of evaluation data."""
    shown = "  ".join(f"{name} {number(value)}" for name, value in values.items())
    line = f"{split:<5} epoch {current_epoch(at)} step {at.step} | {shown} | {samples} samples"
    return f"{line} | best so far" if best else line


def current_epoch(at: Position) -> int:
    """The epoch that the last step belonged to, counted from 1."""
    return at.epoch if at.sample == 0 and at.epoch > 0 else at.epoch + 1


def counted(value: int, total: int | None) -> str:
    """`12/300`, the number padded to the total's width."""
    return str(value) if total is None else f"{value:>{len(str(total))}}/{total}"


def number(value: float) -> str:
    """A number in seven characters with at least two significant digits: 0.00042 must not be shown as 0.000."""
    if 0 < abs(value) < 1e-3 or 1e5 <= abs(value) < math.inf:
        return f"{value:.1e}"
    text = f"{value:.5f}" if abs(value) < 1 else f"{value:#.6g}"
    return text.rjust(7)


def learning_rates(rates: Mapping[str, float]) -> str:
    """The rate, or those of all groups by name, or their range where there are more than four."""
    if len(rates) > 4:
        return f"{min(rates.values()):.2e}..{max(rates.values()):.2e} ({len(rates)} groups)"
    return "  ".join(f"{name.removeprefix('lr').removeprefix('_')} {rate:.2e}".strip() for name, rate in rates.items())
