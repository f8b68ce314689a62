"""A progress bar on a terminal that someone looks at."""

import os
import sys
from typing import Any, Literal

from tqdm import tqdm


def progress_bar(total: int | None, done: int, *, shown: bool) -> "tqdm[Any]":
    """A bar over optimizer steps; one that is not shown does nothing. Lines of the log appear above it."""
    return tqdm(
        total=total,
        initial=done,
        desc="train",
        unit="step",
        dynamic_ncols=True,
        mininterval=0.2,
        leave=False,
        disable=not shown,
    )


def wants_bar(choice: Literal["auto", "on", "off"]) -> bool:
    """Whether to draw one: "auto" does on a terminal, and not in a Slurm job, whose output goes to a file."""
    if choice == "auto":
        return sys.stderr.isatty() and "SLURM_JOB_ID" not in os.environ
    return choice == "on"
