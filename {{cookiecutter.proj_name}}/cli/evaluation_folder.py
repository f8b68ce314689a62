"""The settings of an evaluation, its output folder, and the error files of a failed one."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from common.base.files import without_tilde
from common.config import section
from common.distributed import Rank
from common.failure.hub import print_failure
from common.failure.report import Failure, describe
from common.run.paths import DirConfig, RunPaths
from common.run_context import keep_error
from custom.config import Config


@section
class EvalConfig(Config):
    """The settings of `evaluate.py`: a training config, and which checkpoint to evaluate on which split."""

    model_pt: Annotated[str | None, Field(description="checkpoint, or the folder of a run: its best; required")] = None
    split: Annotated[Literal["train", "val", "eval"], Field(description="split to evaluate on")] = "eval"


def eval_dir(config: DirConfig, checkpoint: Path, split: str, project: Path) -> Path:
    """Return the output folder for a checkpoint and a split; splits other than eval get their own folder."""
    if config.eval_dir is not None:
        return project / without_tilde(config.eval_dir, "dir.eval_dir")
    name = checkpoint.stem if split == "eval" else f"{checkpoint.stem}_{split}"
    return RunPaths.of_checkpoint(checkpoint).eval / name


@contextmanager
def error_files(rank: Rank, folder: Path) -> Iterator[None]:
    """Write the traceback of an error raised in the block to `error_rank<k>.txt` in `folder`."""
    paths = RunPaths(folder)

    def record_failure(failure: Failure, to_terminal: bool) -> None:
        if failure.trace and failure.rank == rank.rank:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            keep_error(failure, paths)
        print_failure(failure, to_terminal, paths.error_file(failure.rank) if failure.trace else None)

    rank.failure_monitor.sink = record_failure
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if rank.is_single_process:
            record_failure(describe(error, rank), False)  # not to the terminal: `report_errors` prints it
        raise
