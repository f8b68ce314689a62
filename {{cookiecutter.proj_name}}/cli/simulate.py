"""`--dist.simulate N`: what each of N ranks would get and hold, from one process on this machine. It starts no run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from common.base.errors import UserError
from common.base.nested import map_leaves
from common.base.text import label
from common.build import build_parts
from common.checkpoint.file import write_checkpoint
from common.checkpoint.saver import whole
from common.config.registry import import_path
from common.data.loader import Step, TrainStream
from common.data.plan import GlobalBatch, evaluation_shares
from common.data.view import kind_of
from common.distributed import Rank
from common.distributed.process import set_up_process
from common.distributed.seed import choose_seed
from common.distributed.sharded import is_sharded, local
from common.distributed.simulate import simulated_rank
from common.monitor import Monitor
from common.monitor.log import setup_log
from common.progress import Position
from common.run.paths import PROJECT, RunPaths
from common.run_context import RunContext
from common.trainer import Trainer
from cli.first_batch import tensors
from cli.kept import kept_bytes
from custom.config import Config


def simulate(config: Config, values: Mapping[str, Any], command: Sequence[str]) -> int:
    """Simulate rank `dist.rank` of `dist.simulate`, and print a report. Returns the exit code.

    Raises:
        UserError: the ranks cannot be simulated, or this config cannot train that many.
    """
    setup_log("WARNING")
    with simulated_rank(config.gpu_ids, config.dist) as rank, TemporaryDirectory() as folder:
        set_up_process(config.dist, rank)
        trainer = build(config, values, command, rank, RunPaths(Path(folder)))
        samples, memory, file_size = dict(all_samples(trainer)), measure_step(trainer), measure_checkpoint(trainer)
        for data in trainer.parts.data:
            data.close()
    world, stream = rank.world_size, trainer.stream
    print(f"rank {rank.rank:,} of {world:,}, simulated on {rank.device}; no run was started\n")
    print(f"{'samples':<20}{'all':>13}{'least':>11}{'most':>11}{f'rank {rank.rank:,}':>13}{'ranks without':>16}")
    for name, counts in samples.items():
        numbers = f"{sum(counts):>13,}{min(counts):>11,}{max(counts):>11,}{counts[rank.rank]:>13,}"
        print(f"  {name:<18}{numbers}{counts.count(0):>16,}")
    print(f"every sample exactly once over all {world:,} ranks")
    factors = f"{config.batch_size:,} x {config.optim.accumulate:,} accumulated"
    factors += "" if config.dist.reduction == "fixed" else f" x {world:,} ranks"
    steps = stream.steps_per_epoch or "unknown"
    print(f"a step takes {stream.samples_per_step:,} samples: {factors}; steps per epoch: {steps}")
    print("\nmemory of this rank, in MB")
    for name, value in memory.items():
        print(f"  {name:<47}{value / 1e6:>13,.3f}")
    print(f"a checkpoint's file, in MB{file_size / 1e6:>36,.3f}")
    return 0


def build(config: Config, values: Mapping[str, Any], command: Sequence[str], rank: Rank, paths: RunPaths) -> Trainer:
    """Build everything that the config names, as `rank`."""
    run = RunContext(config=config, values=dict(values), argv=command, project=PROJECT, rank=rank, paths=paths)
    run.seed, run.monitor = choose_seed(config.dist, rank), Monitor(config.monitor, rank, None, values=values)
    trainer = Trainer(config, build_parts(config, rank, run.seed), run)
    for name in config.plugins:
        import_path(name)(trainer)
    return trainer


def all_samples(trainer: Trainer) -> Iterator[tuple[str, list[int]]]:
    """Count the samples of each rank, in an epoch and in every evaluation, by the name of the data.

    Raises `UserError` for a dataset that each rank would have to read as a whole.
    """
    parts, world = trainer.parts, trainer.rank.world_size
    stages = {f"stages[{number}].train": stream for number, stream in parts.stage_streams.items()}
    for name, stream in ({"train": parts.stream} | stages).items():
        if isinstance(stream, TrainStream):
            plan = stream.plan
            order = plan.order(0)[: plan.steps_per_epoch * plan.samples_per_step]  # drop_last leaves out the rest
            yield name, count_samples(name, order, plan.shares(Position()))
        elif world > 1 and not callable(getattr(stream.dataset, "share", None)):
            raise UserError(
                f"dataset.{name}: {kind_of(stream.dataset)} is read in sequence and has no method share, so each of "
                f"{world:,} ranks would read all records to keep its own; see docs/data.md, Streams"
            )
    for loader in (*parts.val, *parts.evaluation):
        name, shares = label(loader.split, loader.name), evaluation_shares(loader.size, loader.batch_size, world)
        yield name, count_samples(name, np.arange(loader.size), shares)


def count_samples(name: str, wanted: np.ndarray[Any, Any], shares: Iterable[Sequence[int]]) -> list[int]:
    """Count the samples of each rank. `shares`: their numbers, one rank after the other; `wanted`: of all of them.

    Raises `UserError` if a sample is not in exactly one share.
    """
    missing, counts = np.bincount(wanted), []  # a sample that an order repeats has another number each time
    for numbers in shares:
        np.subtract.at(missing, numbers, 1)
        counts.append(len(numbers))
    if missing.any():
        raise UserError(f"{name}: sample {missing.nonzero()[0][0]} is not read exactly once over all ranks")
    return counts


def measure_step(trainer: Trainer) -> dict[str, int]:
    """Take one optimizer step with one micro-batch. Returns the bytes that this rank holds, by what they are for."""
    task, stream, size = trainer.task, trainer.stream, trainer.config.batch_size
    size = min(size, stream.epoch_size or size)
    trainer.optimizer_step.check = None  # weights that are gathered from ranks which do not exist are not real
    plan = GlobalBatch([], [1.0], [size], size * trainer.rank.world_size, trainer.at)
    task.train()
    with kept_bytes(task) as sums:
        trainer.optimizer_step(Step([stream.sample_batch(full=True)], plan), trainer.at)
    return {
        "weights": size_of(list(task.parameters())),
        "buffers": size_of(list(task.buffers())),
        "gradients": size_of([parameter.grad for parameter in task.parameters()]),
        "optimizer state": size_of(trainer.optimizer.state_dict()),
        "averaged weights": size_of(trainer.ema.state_dict()),
        f"kept for the backward pass of {size} samples": max(sums),
    }


def size_of(values: Any) -> int:
    """Bytes of this process' parts of the tensors in nested values; tied ones count once."""
    return sum({(part.data_ptr(), part.shape): part.nbytes for part in map(local, tensors(values))}.values())


def measure_checkpoint(trainer: Trainer) -> int:
    """Write a checkpoint as rank 0 does. Returns the size of its file."""
    path, state = trainer.paths.checkpoints / "latest.pt", trainer.state.state_dict(trainer.at, {})
    path.parent.mkdir()
    # A clone, since gathered tensors are views of larger ones.
    write_checkpoint(map_leaves(state, lambda value, _: whole(value).clone() if is_sharded(value) else value), path)
    return path.stat().st_size
