"""`--dist.simulate N`: what each of N ranks would get and hold, from one process on this machine. It starts no run."""

import io
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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
from custom.config import Config

_COPIES = 4  # of the weights, which a step needs: themselves, gradients, two moments
_FILES = 150  # that a process opens by itself, with some loader workers; see docs/scale.md
_NO_SHARE = (
    "dataset.{}: {} is read in sequence and has no method share, so each of {:,} ranks would read all records to keep "
    "its own; see docs/data.md, Streams"
)


class Shares(NamedTuple):
    """What each rank reads of some data: how many samples, and in words the first one read too often or not at all."""

    name: str
    own: list[int]
    wrong: str


def count_shares(name: str, wanted: np.ndarray, shares: Iterable[Sequence[int]]) -> Shares:
    """Count the samples of each rank. `shares`: their numbers, one rank after the other; `wanted`: of all of them."""
    times = np.bincount(wanted)  # a sample that an order repeats has another number each time
    seen, own = np.zeros_like(times), []
    for numbers in shares:
        np.add.at(seen, numbers, 1)
        own.append(len(numbers))
    wrong = [f"{name}: sample {at} is read {seen[at]} times, not {times[at]}" for at in np.flatnonzero(seen != times)]
    return Shares(name, own, "".join(wrong[:1]))


def all_shares(trainer: Trainer) -> Iterator[Shares]:
    """Count the samples of each rank in an epoch, in its last step, and in every evaluation.

    Raises `UserError` for a data set that each rank would have to read as a whole.
    """
    parts, world = trainer.parts, trainer.rank.world_size
    streams = {f"stages[{number}].train": each for number, each in parts.stage_streams.items()}
    for name, stream in ({"train": parts.stream} | streams).items():
        if isinstance(stream, TrainStream):
            plan, order = stream.plan, stream.plan.order(0)
            last = (plan.steps_per_epoch - 1) * plan.samples_per_step
            order = order[: last + plan.samples_per_step]  # drop_last leaves out the rest
            for what, start in ((name, 0), (f"{name}, last step of an epoch", last)):
                yield count_shares(what, order[start:], plan.shares(Position(0, 0, start, len(order))))
        elif world > 1 and not callable(getattr(stream.dataset, "share", None)):
            raise UserError(_NO_SHARE.format(name, kind_of(stream.dataset), world))
    for each in (*parts.val, *parts.evaluation):
        shares = evaluation_shares(each.size, each.batch_size, world)
        yield count_shares(label(each.split, each.name), np.arange(each.size), shares)


def measure_step(trainer: Trainer) -> dict[str, int]:
    """Take one optimizer step with one micro-batch. Returns the bytes that this rank holds, by what they are for.

    Only the weights, without a step, where the machine has too little memory for one.
    """
    task, size = trainer.task, min(trainer.config.batch_size, trainer.stream.epoch_size or trainer.config.batch_size)
    weights = {"weights": size_of(list(task.parameters())), "buffers": size_of(list(task.buffers()))}
    if _COPIES * weights["weights"] > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return weights
    storages = {local(each).untyped_storage().data_ptr() for each in (*task.parameters(), *task.buffers())}
    kept, sums = dict[int, Tensor](), [0]

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # while it is there, no other has this address
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        sums.append(sum(each.untyped_storage().nbytes() for at, each in kept.items() if at not in storages))
        kept.clear()  # counted once, when the backward pass begins
        return tensor

    trainer.optimizer_step.check = None  # weights that are gathered from ranks which do not exist are not real
    plan = GlobalBatch([], [1.0], [size], size * trainer.rank.world_size, trainer.at)
    task.train()
    with saved_tensors_hooks(pack, unpack):
        trainer.optimizer_step(Step([trainer.stream.sample_batch(full=True)], plan), trainer.at)
    return weights | {
        "gradients": size_of([each.grad for each in task.parameters()]),
        "optimizer state": size_of(trainer.optimizer.state_dict()),
        "averaged weights": size_of(trainer.ema.state_dict()),
        f"kept for the backward pass of {size} samples": max(sums),
    }


def size_of(values: Any) -> int:
    """Bytes of this process' parts of the tensors in nested values; tied ones count once."""
    return sum({(part.data_ptr(), part.shape): part.nbytes for part in map(local, tensors(values))}.values())


def measure_checkpoint(trainer: Trainer) -> tuple[int, int, float]:
    """Write a checkpoint. Returns its bytes, those of them that grow with the ranks, and the seconds that it took."""
    state, path, buffer = (
        trainer.state.state_dict(trainer.at, {}),
        trainer.paths.checkpoints / "latest.pt",
        io.BytesIO(),
    )
    # As rank 0 does before it writes. A clone, since gathered tensors are views of larger ones.
    state = map_leaves(state, lambda value, path: whole(value).clone() if is_sharded(value) else value)
    path.parent.mkdir(parents=True)
    start = time.perf_counter()
    write_checkpoint(state, path)
    seconds = time.perf_counter() - start
    torch.save([state["random"], state["ranks"]], buffer)
    return path.stat().st_size, buffer.tell(), seconds


def build(config: Config, values: Mapping[str, Any], command: Sequence[str], rank: Rank, root: Path) -> Trainer:
    """Build everything that the config names as `rank`, with `root` as the run's folder."""
    paths = RunPaths(root)
    run = RunContext(config=config, values=dict(values), argv=command, project=PROJECT, rank=rank, paths=paths)
    run.seed, run.monitor = choose_seed(config.dist, rank), Monitor(config.monitor, rank, None, values=values)
    trainer = Trainer(config, build_parts(config, rank, run.seed), run)
    for name in config.plugins:
        import_path(name)(trainer)
    return trainer


def simulate(config: Config, values: Mapping[str, Any], command: Sequence[str]) -> int:
    """Simulate rank `dist.rank` of `dist.simulate`, and print a report. Returns the exit code: 1 if shares are wrong.

    Raises:
        UserError: the ranks cannot be simulated, or so many cannot train by this config.
    """
    setup_log("WARNING")
    root = RunPaths.for_run(config.dir, config.name, PROJECT).root
    disk = next(folder for folder in root.parents if folder.is_dir())  # that runs are written to
    with (
        simulated_rank(config.gpu_ids, config.dist) as rank,
        TemporaryDirectory(prefix=".simulated_", dir=disk) as place,
    ):
        set_up_process(config.dist, rank)
        trainer = build(config, values, command, rank, Path(place) / config.name)
        shares, memory, saved = list(all_shares(trainer)), measure_step(trainer), measure_checkpoint(trainer)
        for data in trainer.parts.data:
            data.close()
    world, stream = rank.world_size, trainer.stream
    print(f"rank {rank.rank:,} of {world:,}, simulated on {rank.device}; no run was started\n")
    print(f"{'samples':<36}{'all':>13}{'least':>11}{'most':>11}{f'rank {rank.rank:,}':>13}")
    for name, own, _ in shares:
        print(f"  {name:<34}{sum(own):>13,}{min(own):>11,}{max(own):>11,}{own[rank.rank]:>13,}")
    wrong = [each.wrong for each in shares if each.wrong]
    print("\n".join(wrong) or f"every sample exactly once over all {world:,} ranks")
    size = f"{config.batch_size:,} x {config.optim.accumulate:,} accumulated x {world:,} ranks"
    print(f"a step takes {stream.samples_per_step:,} samples: {size}; steps per epoch: {stream.steps_per_epoch or '?'}")
    print("\nmemory of this rank")
    for name, value in memory.items():
        print(f"  {name:<50}{in_bytes(value):>10}")
    print(f"\na checkpoint has {in_bytes(saved[0])}, {in_bytes(saved[1])} of them random states and parts of each rank")
    print(f"it was written in {saved[2]:.2f} s, {in_bytes(saved[0] / saved[2])} per second")
    print("".join(f"\nnote: {note}" for note in notes(trainer, shares, memory, saved[0])))
    return int(bool(wrong))


def in_bytes(value: float) -> str:
    """Format a number of bytes: 1.23 MB."""
    power = next((power for power in range(5) if value < 999.5 * 1000**power), 5)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}B"


def notes(trainer: Trainer, shares: Sequence[Shares], memory: Mapping[str, int], saved: int) -> Iterator[str]:
    """Yield what is wasted or breaks with so many ranks, and what to do. `saved`: bytes of a checkpoint."""
    config, rank, world = trainer.config, trainer.rank, trainer.rank.world_size
    for name, own, _ in shares:
        if idle := own.count(0):
            wasted = "sample and repeat others, with weight 0" if "train" in name else "batch"
            advice = ": use a smaller eval_batch_size" if wasted == "batch" and sum(own) > world - idle else ""
            yield f"{name}: {idle:,} ranks have no {wasted}{advice}"
    rows = [len(each) for each in trainer.task.parameters() if is_sharded(each)]
    if few := sum(each <= (world - 1) * -(-each // world) for each in rows):
        yield f"{few} of {len(rows)} weights have too few rows for {world:,} ranks: the last ranks hold nothing of them"
    if len(memory) == 2:
        yield "the machine has too little memory for a step, so only the weights were measured"
    yield f"{world * max(1, config.num_workers):,} processes read the data, {max(1, config.num_workers)} for each rank"
    yield f"on a resume, each rank reads the checkpoint: {in_bytes(world * saved)} in all"
    files, (_, limit) = _FILES + 2 * (world - 1) + world * rank.is_main, resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < limit < files:
        yield f"this rank opens about {files:,} files, but the machine allows {limit:,}: raise its limit, ulimit -Hn"
    if config.resume is not None:
        yield f"resume: {config.resume} was not read"
