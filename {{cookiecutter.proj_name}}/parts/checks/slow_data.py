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
        self._workers = workers
        self._cores = available_cores()
        if rank.launcher != "slurm":  # which gives each process cores of its own
            self._cores = max(self._cores // rank.local_world, 1)
        self._at = at
        self._waited = 0.0
        self._is_given = False

    def __call__(self, at: Position, timing: Timing) -> None:
        wait_s = timing.data * timing.step
        self._waited += wait_s * (at.step - self._at.step)
        self._at = at
        is_slow = timing.data > _SLOW_SHARE and wait_s >= _SLOW_BATCH_S and self._waited >= _SLOW_TOTAL_S
        if is_slow and not self._is_given:
            self._is_given = True
            remedy = "try more workers"
            if self._workers >= self._cores:
                remedy = "more workers would not help: try less work per sample"
            logger.warning(
                "{:.0%} of the time is spent waiting for data; {} (--num_workers is {}, cores of this process: {}), "
                "or keep it in memory",
                *(timing.data, remedy, self._workers, self._cores),
            )
