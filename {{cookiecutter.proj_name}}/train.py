"""Train a model: python train.py --config configs/default.yaml [--key value ...]"""

import sys
from typing import Any

from common import distributed
from common.base.errors import UserError
from common.checkpoint import LoadedCheckpoint, find_checkpoint
from common.checkpoint.guarantee import changes, check_changes, resume_guarantee
from common.config import parse
from common.config.registry import REGISTRIES, import_path
from common.distributed import Rank
from common.distributed.process import set_up_process
from common.distributed.seed import choose_seed, mix, set_seed
from common.evaluation.best import BestTracker
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.failure.failsafe import leave, reported, together
from common.monitor.log import logger, setup_log
from common.optim.precision import build_precision
from common.progress import Outcome
from common.run.folder import check_stays, drop_stored_launch_options, has_saved, stored_config
from common.run.paths import RunPaths
from common.run_context import BeforeTheRun, Start, recorded, session
from common.trainer import Settings, Trainer
from custom.build import PROJECT, build_data, build_model, log_end, log_start
from custom.config import Config
from custom.task import ClassificationTask


def main(argv: list[str]) -> int:
    """Read the config and train as it says. Returns the exit code."""
    setup_log()
    stored = stored_config(argv, "--resume")
    resolved = parse(
        Config,
        drop_stored_launch_options(argv, stored, only_under_launcher=True),
        prog="train.py",
        description=__doc__ or "",
        registries=REGISTRIES,
        default=stored,
        debug_overlay=PROJECT / "configs" / "debug.yaml",
    )
    config = resolved.config
    code = distributed.spawn(config.gpu_ids, config.dist, [__file__, *argv])
    if code is not None:  # this process only started those that train
        return code
    place = distributed.find_rank(config.gpu_ids, config.dist)
    set_up_process(config.dist, place)
    folder = RunPaths.for_run(config.dir, config.name, PROJECT)
    with (
        together(place, config.dist, resolved.values) as rank,
        recorded(BeforeTheRun(folder, rank, config.resume if config.progress.start_epoch else None), rank),
    ):
        outcome = train(config, folder, resolved.values, rank, [__file__, *argv])
    return outcome.exit_code


def train(config: Config, folder: RunPaths, values: dict[str, Any], rank: Rank, argv: list[str]) -> Outcome:
    """Build everything that the config names, open the run's folder, train."""
    # A job that its launcher restarted continues its own run, whatever --resume or start_epoch say; never another.
    restarted = distributed.from_main(rank.restarted and has_saved(folder, rank.launched_as), rank)
    only_weights = config.progress.start_epoch == 0 and not restarted
    checkpoint = find_checkpoint("auto" if restarted else config.resume, folder.checkpoints, rank)
    resumed = None if only_weights else checkpoint
    own = resumed if resumed is not None and resumed.belongs_to(folder.root) else None
    if own is None:  # an earlier run of this name moves out of the way, with whatever would be taken from it
        sources = {"init_from.path": config.init_from.path, "resume": checkpoint.path if checkpoint else None}
        check_stays(sources, folder, PROJECT)
    # A seed that was drawn belongs to the run: the order of its samples follows from it.
    seed = choose_seed(config.dist, rank, drawn=None if resumed is None else resumed.seed)
    # Before the folder is touched: a mistake in here moves no earlier run out of the way.
    ingredients = build_ingredients(config, rank, seed)
    start = Start(argv, values, seed, own, config.progress.local_progress, workers=config.worker)
    with session(config.monitor, folder, rank, start, PROJECT) as monitor:
        trainer = Trainer(
            Settings(config.progress, config.optim, config.prepare, config.dist, config.debug, config.checkpoint),
            **ingredients,
            best=BestTracker(config.best, config.early_stop, config.best_mode),
            monitor=monitor,
            run=folder,
            rank=rank,
            seed=seed,
            about={"config": values, "seed": seed},
        )
        set_seed(mix(seed, rank.rank))  # from here on each process draws its own numbers (dropout)
        for name in config.plugins:
            import_path(name)(trainer)
        restore(trainer, checkpoint, config, only_weights)
        if checkpoint is not None:
            checkpoint.state.clear()  # as long as its tensors are in use, its file keeps its space on the disk
        log_start(config, trainer, seed)
        outcome = trainer.train()
        monitor.end("stopped" if outcome.exit_code else "finished", outcome.at, outcome.reason)
        log_end(trainer, outcome)
    return outcome


def restore(trainer: Trainer, checkpoint: LoadedCheckpoint | None, config: Config, only_weights: bool) -> None:
    """Continue from a checkpoint, or take only its weights."""
    if checkpoint is None:
        if config.resume is not None:
            logger.info("resume {}: nothing was saved yet, so the run starts", config.resume)
        return
    if only_weights:
        trainer.load_weights(checkpoint.state, checkpoint.path)
        logger.info("starting from the weights of {}", checkpoint.path)
        return
    about, old, new = checkpoint.state["about"], checkpoint.state["fingerprint"], trainer.state.fingerprint
    found = list(changes(about["config"], trainer.state.about["config"]))
    safe, breaking = check_changes(found, old, new, allowed=config.allow_changes, elastic=trainer.rank.restarted)
    if any(change.key == "optim.optim_type" for change in breaking):
        raise UserError("optim.optim_type: another optimizer cannot go on; use its weights: --progress.start_epoch 0")
    trainer.load_state_dict(checkpoint.state, checkpoint.path)
    at = trainer.at
    logger.info("resuming {} at epoch {}, sample {}, step {}", checkpoint.path, at.epoch, at.sample, at.step)
    if safe or breaking:
        logger.info("changed since then:\n{}", "\n".join(map(str, safe + breaking)))
    logger.info("{}", resume_guarantee(old, new, safe, breaking))


def build_ingredients(config: Config, rank: Rank, seed: int) -> dict[str, Any]:
    """What the config names: model, task, data. The seed decides the first weights, alike on all ranks."""
    set_seed(seed)
    loss = LossFactory(config.loss)
    return {
        "model": build_model(config, loss, seed),
        "task": ClassificationTask(loss, MetricFactory(config.metric)),
        "precision": build_precision(config.precision, rank.device),
        **vars(build_data(config, rank, seed)),
    }


if __name__ == "__main__":
    with reported():
        leave(main(sys.argv[1:]))
