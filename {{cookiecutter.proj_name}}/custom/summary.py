"""The last lines of a run: what it has reached, where everything is, and what to do next."""

import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from time import perf_counter

from common.base.process import terminal_width
from common.monitor.line import number
from common.monitor.writer import without_twins
from common.progress import Outcome
from common.trainer import Trainer

_PROJECT = Path(__file__).resolve().parents[1]
_FILES = ("train.log", "report.html", "metrics.jsonl", "checkpoints", "eval", "progress")
_WIDEST = 100


def summary(trainer: Trainer, outcome: Outcome | None) -> str:
    """At most eight lines. `outcome`: None for a run that was left without saving."""
    best, folder, saved = trainer.best.best, trainer.saver.folder, trainer.saver.saved_step
    time = timedelta(seconds=round(perf_counter() - trainer.monitor.clock.started))
    rows = []
    if best is not None:
        rows.append(("best", f"{values(best.values, trainer)} (best.pt: step {best.step})"))
    if last := trainer.progress.values:
        rows.append(("last", values(last, trainer) + f" (latest.pt: step {saved})" * bool(saved)))
    rows.append(("files", ", ".join(name for name in _FILES if (trainer.paths.root / name).exists())))
    if outcome is None or outcome.exit_code:
        again = command("train.py", "--resume", trainer.paths.root) if saved else "nothing was saved"
        rows.append(("resume", again))
    if saved:
        shown = folder.best if best is not None else folder.latest
        rows.append(("evaluate", command("evaluate.py", "--model_pt", shown)))
    if any(trainer.paths.root.glob("events.out.tfevents.*")):
        rows.append(("curves", command("-m tensorboard.main", "--logdir", trainer.paths.root)))
    head = f"{shown_path(trainer.paths.root)}, trained for {time}"
    return "\n".join([head, *(f"  {name:<8} {text}" for name, text in rows)])


def values(found: Mapping[str, float], trainer: Trainer) -> str:
    """Measured values: first the one that decides about the best checkpoint, then as many as fit in the line."""
    key, text = trainer.best.config.metric, ""
    room = min(terminal_width(), _WIDEST) - len("  evaluate  (latest.pt: step 1000000)")
    for name in sorted(without_twins(found), key=lambda name: name != key):
        longer = f"{text}  {name} {number(found[name]).strip()}".strip()
        if text and len(longer) > room:
            return f"{text}  …"
        text = longer
    return text


def command(program: str, option: str, path: Path) -> str:
    """A command to copy, from the folder where this one was given; in two lines where a terminal is too narrow."""
    words = f"python {program if program.startswith('-') else shown_path(_PROJECT / program)}"
    line = f"{words} {option} {shown_path(path)}"
    fits = len("  evaluate ") + len(line) <= terminal_width() or not sys.stderr.isatty()
    return line if fits else f"{words} \\\n    {option} {shown_path(path)}"


def shown_path(path: Path) -> Path:
    """The path from the current folder, if it is inside."""
    path = Path.cwd() / path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
