"""Load a trained task from a checkpoint, for evaluate.py, the tools and notebooks."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.build import build_task
from common.checkpoint.file import read_checkpoint
from common.checkpoint.folder import best_in
from common.checkpoint.state import load_state
from common.config.problem import join_names
from common.distributed import DistConfig, Rank, find_rank
from common.distributed.devices import set_up_process
from common.distributed.group import code_of
from common.monitor.log import logger
from common.optim.precision import Precision, build_precision
from common.stage import in_stage
from common.task import Task, TaskPosition
from cli.command_line import parse
from custom.config import Config


@dataclass(frozen=True)
class Trained:
    """A trained task, ready to use, and the settings of its run.

    Attributes:
        path: the checkpoint.
        config: the settings of its run, with the options that were given.
        task: in evaluation mode, on the device of `rank`, with the averaged weights if the checkpoint has them.
        position: position of the run in training, see `Position`.
    """

    path: Path
    config: Config
    task: Task
    rank: Rank
    precision: Precision
    position: Mapping[str, int]


def load_trained(model_pt: str | Path, options: Sequence[str] = ()) -> Trained:
    """Build the task of a checkpoint, and load its weights. The data of its run are not needed.

    Args:
        model_pt: a checkpoint, or the folder of a run.
        options: words of a command line that change the settings of the run, such as "--gpu_ids", "0".

    Raises:
        UserError: there is no checkpoint, or an option is wrong.
    """
    path = best_in(model_pt)
    state = read_checkpoint(path)
    prog = Path(sys.argv[0]).name
    resolved = parse(Config, options, prog=prog, stored=state["about"]["config"], origin=f"the config in {path}")
    for text in resolved.warnings:
        logger.warning("{}", text)
    config = resolved.config
    rank = find_device(config.gpu_ids)
    set_up_process(config.dist, rank)
    return load_task(config, path, state, rank)


def load_task(config: Config, path: Path, state: Mapping[str, Any], rank: Rank) -> Trained:
    """Build the task of the checkpoint `path` with its weights and its position in training; `state` is its content.

    Every process must call this.
    """
    about = state["about"]
    code = code_of()
    changed = [name for name, checksum in state["fingerprint"]["code"].items() if code.get(name) != checksum]
    if changed:
        logger.warning("the code has changed since {} was saved: {}", path.name, join_names(changed, 10))
    precision = build_precision(config.precision, rank.device)
    # Frozen tensors that the checkpoint leaves out come from where the run took them.
    task = build_task(config, rank, first_weights=bool(state.get("frozen")))
    precision.cast(task).to(rank.device)
    if config.prepare.channels_last:  # as in training, for the same bits
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from the stubs
    load_state(task, state, path)
    task.at = TaskPosition(state["position"]["step"], state["position"]["epoch"], *about["lengths"])
    stage = state.get("stages", {}).get("number", 0)
    task.loss.set_weights(in_stage(config, stage).loss)
    task.classes = about["classes"]
    return Trained(path, config, task.eval(), rank, precision, state["position"])


def find_device(gpu_ids: int | list[int] | str) -> Rank:
    """Choose the first device of a run. Raises `UserError` if this machine lacks it."""
    if gpu_ids == "all":
        gpu_ids = 0
    if isinstance(gpu_ids, list):
        gpu_ids = gpu_ids[:1]
    return find_rank(gpu_ids, DistConfig(launcher="none"))
