"""Resources available to this process."""

import os
import sys


def available_cores() -> int:
    """Cores this process may use; under Slurm or in a container, often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def terminal_width() -> int:
    """Columns of the terminal that shows stderr; 100 without one."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 100
    except (OSError, ValueError, AttributeError):
        return 100
