"""Format of the log lines. Widths are fixed where possible, so numbers stay in the same place from line to line."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from common.base.text import number
from common.monitor.clock import Timing
from common.monitor.meter import Reading
from common.monitor.writer import drop_duplicate_loss
from common.progress import Position


class Line(NamedTuple):
    """A line of the log.

    Attributes:
        full: for the file.
        columns: for the terminal, the most important ones first.
        extra: columns that the terminal shows only where they fit.
        brief: shown in place of the columns where these need two lines, and the brief ones do not.
    """

    full: str
    columns: Sequence[str]
    extra: Sequence[str]
    brief: Sequence[str] = ()

    def fitted(self, room: int) -> str:
        """One line, or where the columns need it two, of at most `room` characters; the rest is left out."""
        is_brief = self.brief and len(" | ".join(self.brief)) <= room < len(" | ".join(self.columns))
        columns = self.brief if is_brief else self.columns
        lines = [columns[0]]
        for at, column in enumerate([*columns[1:], *self.extra], 1):
            more, left = f" | {column}", len(columns) - at
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
    raw = drop_duplicate_loss(losses.raw)
    shown = [f"{name} {number(value)} ({number(losses.smooth[name])})" for name, value in raw.items()]
    others = [f"{name} {number(value)}" for name, value in more.items() if name != "grad_norm"]
    grad = [f"grad {number(more['grad_norm'])}"] if "grad_norm" in more else []
    speed = [f"{timing.step * 1000:6.1f} ms/step", f"data {timing.data:4.0%}", f"{timing.rate:6.0f}/s"]
    speed += [f"{name} {seconds * 1000:.1f} ms" for name, seconds in timing.timers.items()]
    eta = [] if timing.eta is None else [f"ETA {timedelta(seconds=round(timing.eta))}"]
    place, mem = position(at, totals), f"mem {memory / 2**20:.0f} MB"
    columns = [f"lr {learning_rates(rates)}", "  ".join(shown), "  ".join(others + grad), " ".join(speed), *eta, mem]
    full = " | ".join(column for column in [place, *columns] if column)
    parts = [f"{name} {number(value)}" for name, value in raw.items()]
    rest, rate = [*others, *parts[1:], *grad], f"lr {learning_rates(rates, most=1)}"
    return Line(full, [place, *shown[:1], rate, *rest], [*eta, *speed, mem], brief=[place, *parts[:1], *rest])


def evaluation_line(
    split: str, where: str, values: Mapping[str, float], samples: int, key: str = "", *, best: bool = False
) -> Line:
    """One line about a pass over `samples` samples of evaluation data. The terminal shows the value `key` first.

    Args:
        where: from `position`. The name of the split replaces its "epoch", so that losses are below those of training.
    """
    shown = {name: f"{name} {number(value)}" for name, value in values.items()}
    place, count = f"{split:<5}{where.removeprefix('epoch')}", f"{samples} samples"
    full = f"{place} | {'  '.join(shown.values())} | {count}{' | best so far' * best}"
    first = [shown.pop(key)] if key in shown else []
    return Line(full, [place, *first, *["best"] * best, *shown.values()], [count])


def position(at: Position, totals: tuple[int | None, int | None]) -> str:
    """Epoch and step; `totals`: steps and epochs of the run, where known."""
    return f"epoch {counted(current_epoch(at), totals[1])} step {counted(at.step, totals[0])}"


def current_epoch(at: Position) -> int:
    """The epoch that the last step belonged to, counted from 1."""
    return at.epoch if at.sample == 0 and at.epoch > 0 else at.epoch + 1


def counted(value: int, total: int | None) -> str:
    """`12/300`, the number padded to the total's width."""
    return str(value) if total is None else f"{value:>{len(str(total))}}/{total}"


def learning_rates(rates: Mapping[str, float], most: int = 4) -> str:
    """The rate, or those of all groups by name, or their range where there are more than `most`."""
    if len(rates) > most:
        return f"{min(rates.values()):.2e}..{max(rates.values()):.2e} ({len(rates)} groups)"
    return "  ".join(f"{name.removeprefix('lr').removeprefix('_')} {rate:.2e}".strip() for name, rate in rates.items())
