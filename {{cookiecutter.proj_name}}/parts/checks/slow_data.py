"""Advice if training waits for its data."""

from loguru import logger

from common.base.process import available_cores
from common.distributed import Rank
from common.monitor.meter import Timing
from common.progress import Position

# Advice is given when waiting for data takes more than each of these:
_SLOW_SHARE = 0.3  # of the time
_SLOW_BATCH_S = 0.002  # per step; less is the cost of calling the loader at all
_SLOW_TOTAL_S = 2.0  # in total


class SlowDataAdvice:
    """Logs advice, once, if training spends much of its time waiting for data. Called at every log line.

    Args:
        workers: number of loader workers.
        rank: this process; others on the same host may share its cores.
        at: the position when training begins.
    """

    def __init__(self, workers: int, rank: Rank, at: Position) -> None:
        # Slurm gives each process cores of its own.
        self._workers, self._processes = workers, 1 if rank.launcher == "slurm" else rank.local_world
        self._at, self._waited, self._is_given = at, 0.0, False

    def __call__(self, at: Position, timing: Timing) -> None:
        self._waited += timing.data * timing.step * (at.step - self._at.step)
        self._at = at
        is_slow = timing.data > _SLOW_SHARE and timing.data * timing.step >= _SLOW_BATCH_S
        if is_slow and self._waited >= _SLOW_TOTAL_S and not self._is_given:
            self._is_given = True
            logger.warning("{}", advice(timing, self._workers, self._processes))


def advice(timing: Timing, workers: int, processes: int = 1) -> str:
    """Say what to try. `processes`: number of processes that share the cores of this one."""
    cores = max(available_cores() // processes, 1)
    remedy = "try more workers"
    if workers >= cores:
        remedy = "more workers would not help: try less work per sample"
    now = f"--num_workers is {workers}, cores of this process: {cores}"
    return f"{timing.data:.0%} of the time is spent waiting for data; {remedy} ({now}), or keep it in memory"
