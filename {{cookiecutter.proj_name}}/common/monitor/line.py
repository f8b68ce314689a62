"""Format of the log lines. Widths are fixed where possible, so numbers stay in the same place from line to line."""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from common.monitor.clock import Timing
from common.monitor.meter import Reading
from common.progress import Position


class Line(NamedTuple):
    """A line of the log.

    Attributes:
        full: for the file.
        columns: for the terminal, the most important ones first.
        extra: columns that the terminal shows only where they fit.
    """

    full: str
    columns: Sequence[str]
    extra: Sequence[str]

    def fitted(self, room: int) -> str:
        """One line, or where the columns need it two, of at most `room` characters; the rest is left out."""
        lines = [self.columns[0]]
        for number, column in enumerate([*self.columns[1:], *self.extra], 1):
            more, left = f" | {column}", len(self.columns) - number
            if len(lines[-1] + more) + len(" | … 999 more") * (len(lines) > 1 and left > 1) <= room:
                lines[-1] += more
            elif left > 0 and len(lines) == 1:
                lines.append(f"  {column}")
            else:
                lines[-1] += f" | … {left} more" * (left > 0)
                break
        return "\n".join(lines)


def train_line(
    at: Position,
    totals: tuple[int | None, int | None],
    rates: Mapping[str, float],
    losses: Reading,
    more: Mapping[str, float],
    timing: Timing,
    memory: int,
) -> Line:
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
    others = [f"{'grad' if name == 'grad_norm' else name} {number(value)}" for name, value in more.items()]
    speed = [f"{timing.step * 1000:6.1f} ms/step", f"data {timing.data:4.0%}", f"{timing.rate:6.0f}/s"]
    eta = [] if timing.eta is None else [f"ETA {timedelta(seconds=round(timing.eta))}"]
    place, mem = position(at, totals), f"mem {memory / 2**20:.0f} MB"
    columns = [f"lr {learning_rates(rates)}", "  ".join(shown.values()), "  ".join(others), " ".join(speed), *eta, mem]
    full = " | ".join(column for column in [place, *columns] if column)
    parts = [text if name == "loss" else f"{name} {number(losses.raw[name])}" for name, text in shown.items()]
    rate = f"lr {learning_rates(rates, most=1)}"
    return Line(full, [place, *parts[:1], rate, *parts[1:], *others], [*eta, *speed, mem])


def evaluation_line(
    split: str, at: Position, values: Mapping[str, float], samples: int, key: str = "", *, best: bool = False
) -> Line:
    """One line about a pass over `samples` samples of evaluation data. The terminal shows the value `key` first."""
    shown = {name: f"{name} {number(value)}" for name, value in values.items()}
    place, count = f"{split:<5} epoch {current_epoch(at)} step {at.step}", f"{samples} samples"
    full = f"{place} | {'  '.join(shown.values())} | {count}{' | best so far' * best}"
    first = [shown.pop(key)] if key in shown else []
    return Line(full, [place, *["best"] * best, *first, *shown.values()], [count])


def position(at: Position, totals: tuple[int | None, int | None]) -> str:
    """Epoch and step; `totals`: steps and epochs of the run, where known."""
    return f"epoch {counted(current_epoch(at), totals[1])} step {counted(at.step, totals[0])}"


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


def learning_rates(rates: Mapping[str, float], most: int = 4) -> str:
    """The rate, or those of all groups by name, or their range where there are more than `most`."""
    if len(rates) > most:
        return f"{min(rates.values()):.2e}..{max(rates.values()):.2e} ({len(rates)} groups)"
    return "  ".join(f"{name.removeprefix('lr').removeprefix('_')} {rate:.2e}".strip() for name, rate in rates.items())
