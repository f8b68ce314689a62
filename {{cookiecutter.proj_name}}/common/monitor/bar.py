"""A progress bar where somebody watches, and nothing where nobody does."""

import os
import sys
from typing import Literal

from tqdm import tqdm


class Bar:
    """A bar on the terminal. Lines of the log appear above it, see `common.monitor.log`."""

    def __init__(self, total: int | None, done: int) -> None:
        self._bar = tqdm(
            total=total, initial=done, desc="train", unit="step", dynamic_ncols=True, mininterval=0.2, leave=False
        )

    def step(self) -> None:
        """One optimizer step is done."""
        self._bar.update()

    def note(self, text: str) -> None:
        """Show a few words at its end."""
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        self._bar.close()


class NullBar:
    """No bar."""

    def step(self) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def wants_bar(choice: Literal["auto", "on", "off"]) -> bool:
    """Whether to draw one: "auto" does on a terminal, and not in a Slurm job, whose output goes to a file."""
    if choice == "auto":
        return sys.stderr.isatty() and "SLURM_JOB_ID" not in os.environ
    return choice == "on"
