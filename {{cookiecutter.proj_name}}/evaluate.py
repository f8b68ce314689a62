"""Evaluate a checkpoint: python evaluate.py --model_pt experiments/<name>/checkpoints/best.pt [--key value ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P and PYTHONSAFEPATH leave it out

from common import distributed
from common.base.errors import UserError
from common.base.parts import fill
from common.base.text import label, number
from common.build import build_evaluation, check_classes
from common.checkpoint.file import read_checkpoint
from common.checkpoint.folder import best_in
from common.config import Resolved, option_value
from common.config.problem import shown_path as shown
from common.distributed import Rank
from common.evaluator import Evaluator
from common.failure.program import distributed_run, exit_process, report_errors
from common.monitor.log import logger, setup_log
from common.monitor.result import SetResult
from common.monitor.writer import drop_duplicate_loss
from common.run.paths import PROJECT, DirConfig, RunPaths
from cli.command_line import parse
from cli.program import EvalConfig, entered, with_default_launch
from cli.trained import load_task


def eval_dir(config: DirConfig, checkpoint: Path, split: str, project: Path) -> Path:
    """Return the output folder for a checkpoint and a split; splits other than eval get their own folder."""
    if config.eval_dir is not None:
        return project / Path(config.eval_dir).expanduser()
    name = checkpoint.stem
    if split != "eval":
        name += f"_{split}"
    return RunPaths.of_checkpoint(checkpoint).eval / name


def main(argv: list[str]) -> int:
    """Evaluate one checkpoint on a split: tables, metrics.json and pictures. Returns the exit code."""
    setup_log()
    resolved = read_config(argv)
    config = resolved.config
    if config.model_pt is None:
        raise UserError(
            "model_pt: which checkpoint? python evaluate.py --model_pt experiments/<name>/checkpoints/best.pt"
        )
    code = distributed.spawn(config.gpu_ids, config.dist, [__file__, *argv])
    if code is not None:  # this process only started the ones that evaluate
        return code
    rank = distributed.find_rank(config.gpu_ids, config.dist)
    path = best_in(config.model_pt)
    folder = eval_dir(config.dir, path, config.split, PROJECT)
    with distributed_run(rank, config.dist, resolved) as rank, entered("explain"):
        text = evaluate(config, path, folder, rank)
    if rank.is_main:  # last, since the reader of a pipe may be gone
        print(text)
    return 0


def read_config(argv: list[str]) -> Resolved[EvalConfig]:
    """Return the config that the command names, or that of the checkpoint."""
    words = argv
    stored = None
    origin = ""
    model_pt = option_value(argv, "--model_pt")
    if model_pt and option_value(argv, "--config") is None:
        path = best_in(model_pt)
        stored = read_checkpoint(path)["about"]["config"]
        origin = f"the config in {path}"
        words = with_default_launch(argv)
    return parse(
        EvalConfig,
        words,
        prog="evaluate.py",
        default=PROJECT / "configs" / "eval.yaml",
        stored=stored,
        origin=origin,
    )


def evaluate(config: EvalConfig, path: Path, folder: Path, rank: Rank) -> str:
    """Build the parts that the config names, evaluate, and write the files. Returns the report; "" on other ranks."""
    setup_log(config.monitor.log_level, rank=rank.rank)
    trained = load_task(config, path, read_checkpoint(path), rank)
    loaders = build_evaluation(config, config.split, rank)
    data = {label(part.split, part.name): part.dataset for part in loaders}
    trained.task.classes = check_classes(config.model, {"train": trained.task, **data})
    if not loaders:
        raise UserError(f"dataset.{config.split} is null in this config, so there is nothing to evaluate on")
    if rank.is_main:
        folder.mkdir(parents=True, exist_ok=True)  # what cannot be written is known before the evaluation
    evaluator = Evaluator(trained.task, rank, trained.precision, fill("pictures", "gallery", None, config))
    result = evaluator.run(loaders)
    for loader in loaders:
        loader.close()
    if not rank.is_main:
        return ""
    position = trained.position
    logger.info("{} of {}, epoch {epoch}, step {step}", config.split, shown(path), **position)
    step = position["step"]
    evaluator.write(folder, result, checkpoint=str(path), split=config.split, step=step, epoch=position["epoch"])
    logger.info("the results are in {}", shown(folder))
    tables = {name: table(measured) for name, measured in result.sets.items()}
    return "\n".join(f"{name}:\n{text}" if name else text for name, text in tables.items())


def table(result: SetResult) -> str:
    """Return the values, one line each, as in the log; `metrics.json` has all digits."""
    values = drop_duplicate_loss(result.values)
    rows = {"samples": f"{result.samples}"} | {name: number(value).strip() for name, value in values.items()}
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


if __name__ == "__main__":
    with report_errors():
        exit_process(main(sys.argv[1:]))
