"""A trace of some training steps by torch.profiler: how long each operator takes, on the CPU and on the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from loguru import logger

from common.run_context import RunContext
from common.trainer import Trainer
from parts.profile.config import ProfileConfig


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Record some of the steps that are trained in this block, in the main process."""
    config: ProfileConfig = trainer.config.profile  # type: ignore[attr-defined]  # which this part adds
    monitor, rank = run.monitor, run.rank
    if not (config.steps and rank.is_main):
        yield
        return
    file = run.paths.root / "profile.json"
    after_step = monitor.after_step

    def write(profile: torch.profiler.profile) -> None:
        after_step.remove(step)
        profile.export_chrome_trace(str(file))
        key = "self_cuda_time_total" if rank.device.type == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=40)
        logger.info("{} has a profile of training steps\n{}", file, table)

    def step() -> None:
        profile.step()
        monitor.clock.reset()  # writing takes seconds

    schedule = torch.profiler.schedule(wait=config.wait - 1, warmup=1, active=config.steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        after_step.append(step)
        yield
    if step in after_step:
        logger.warning("profile: training ended within the first profile.wait = {} steps: no {}", config.wait, file)
