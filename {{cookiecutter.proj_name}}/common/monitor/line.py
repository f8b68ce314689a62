"""How the lines of the log look. Widths are fixed where they can be, so that the eye finds a number where it was."""

import math
from collections.abc import Mapping, Sequence

from common.monitor.clock import Timing
from common.monitor.meter import Reading
from common.progress import Position


def train_line(
    at: Position,
    *,
    total_steps: int | None,
    epochs: int | None,
    rates: Sequence[float],
    losses: Reading,
    grad_norm: float | None,
    timing: Timing,
    memory: int,
) -> str:
    """One line about training. A loss is shown as `raw (smooth)`.

    Args:
        at: after the step.
        total_steps: optimizer steps of the whole run, if known; so `epochs`.
        rates: learning rate of each parameter group.
        memory: bytes.
    """
    loss = losses.raw.get("loss", float("nan"))
    parts = {name: value for name, value in losses.raw.items() if name != "loss"}
    shown = f"loss {number(loss)} ({number(losses.smooth.get('loss', loss))})"
    if list(parts.values()) != [loss]:  # a single loss is the sum already
        shown += "".join(f"  {name} {number(value)} ({number(losses.smooth[name])})" for name, value in parts.items())
    columns = [
        f"epoch {counted(current_epoch(at), epochs)} step {counted(at.step, total_steps)}",
        f"lr {learning_rates(rates)}",
        shown,
        None if grad_norm is None else f"grad {number(grad_norm)}",
        f"{duration_each(timing.step)} data {timing.data:4.0%} {timing.rate:6.0f}/s",
        None if timing.eta is None else f"ETA {clock_time(timing.eta)}",
        f"mem {size(memory)}",
    ]
    return " | ".join(column for column in columns if column is not None)


def evaluation_line(split: str, at: Position, values: Mapping[str, float], samples: int, *, best: bool = False) -> str:
    """One line about a pass over `samples` samples of evaluation data."""
    shown = "  ".join(f"{name} {number(value)}" for name, value in values.items())
    ending = " | best so far" if best else ""
    return f"{split:<5} epoch {current_epoch(at)} step {at.step} | {shown} | {samples} samples{ending}"


def current_epoch(at: Position) -> int:
    """The epoch that the last step belonged to, counted from 1."""
    return at.epoch if at.sample == 0 and at.epoch > 0 else at.epoch + 1


def counted(value: int, total: int | None) -> str:
    """`12/300`, the number padded to the total's width."""
    return str(value) if total is None else f"{value:>{len(str(total))}}/{total}"


def number(value: float) -> str:
    """Seven characters whatever the size, and never fewer than two digits: 0.00042 must not be shown as 0.000."""
    if 0 < abs(value) < 1e-3 or 1e5 <= abs(value) < math.inf:
        return f"{value:.1e}"
    text = f"{value:.5f}" if abs(value) < 1 else f"{value:#.6g}"
    return text.rjust(7)


def learning_rates(rates: Sequence[float]) -> str:
    """The rates of all groups; once if they are the same, and the range where there are more than four."""
    distinct = list(dict.fromkeys(rates))
    if len(distinct) > 4:
        return f"{min(rates):.2e}..{max(rates):.2e} ({len(rates)} groups)"
    return "/".join(f"{rate:.2e}" for rate in (distinct if len(distinct) == 1 else rates[:4]))


def duration_each(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds * 1000:6.1f} ms/step"
    return f"{seconds:6.1f}  s/step"


def clock_time(seconds: float) -> str:
    """`1:02:03`, or `2d 03:04:05`."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    return f"{days}d {hours:02}:{minutes:02}:{whole % 60:02}" if days else f"{hours}:{minutes:02}:{whole % 60:02}"


def size(count: int) -> str:
    """Bytes for people, 6 characters: `410 MB`, `1.2 GB`."""
    megabytes = count / 2**20
    return f"{megabytes:3.0f} MB" if megabytes < 999.5 else f"{megabytes / 1024:3.1f} GB"
