"""A learning rate that falls and starts again."""

from common.config.registry import SCHEDULE_REGISTRY


@SCHEDULE_REGISTRY.register()
def sawtooth(step: int, period: int = 20) -> float:
    """Falls from 1 by 3 % a step, and starts again every `period` steps."""
    return 0.97 ** (step % period)
