"""Learning rate schedules. Every file named `*_schedule.py` below this folder is imported, so that they are registered.

A schedule is a function of the step that returns a factor of the learning rate. common/optim/factors.py has `constant`,
`linear`, `cosine` and `plateau`, and lists the parameters that a schedule may have. For
`lr_scheduler: {type: halving, args: {every: 500}}`:

    from common.config.registry import SCHEDULE_REGISTRY

    @SCHEDULE_REGISTRY.register()
    def halving(step: int, min_factor: float, every: int = 1000) -> float:
        return max(min_factor, 0.5 ** (step // every))
"""

from common.config.registry import SCHEDULE_REGISTRY

SCHEDULE_REGISTRY.scan(__name__, "_schedule")
