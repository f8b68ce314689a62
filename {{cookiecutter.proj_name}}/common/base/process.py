"""Resources available to this process."""

import os


def available_cores() -> int:
    """Cores this process may use; under Slurm or in a container, often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
