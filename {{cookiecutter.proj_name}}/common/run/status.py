"""`status.json`: the state of a run, for scripts that monitor it. Needs no PyTorch."""

import json
import os
from datetime import datetime
from typing import Any, Literal

from common.base.files import write_text
from common.run.paths import RunPaths

State = Literal["running", "stopped", "failed", "finished"]


def write_status(
    folder: RunPaths,
    state: State,
    *,
    step: int | None = None,
    reason: str = "",
) -> None:
    """Replace `status.json`: `{"state", "step", "reason", "time", "pid"}`."""
    status = {
        "state": state,
        "step": step,
        "reason": reason,
        "time": now(),
        "pid": os.getpid(),
    }
    write_text(folder.status_file, json.dumps(status, indent=2) + "\n")


def read_status(folder: RunPaths) -> dict[str, Any] | None:
    """Read the last status that `write_status` wrote; None if there is none."""
    if not folder.status_file.exists():
        return None
    status: dict[str, Any] = json.loads(folder.status_file.read_text())
    return status


def now() -> str:
    """Local time with its offset from UTC, as in 2026-03-01T14:05:00+01:00."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
