"""Hand each saved checkpoint to the functions of `checkpoint.after_save`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from loguru import logger

from common.run_context import RunContext
from common.trainer import Trainer
from parts.after_save.calls import AfterSave, finish


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Call them for what is saved in this block, in the main process; not in debugging, nor in trials of the tools."""
    functions: list[AfterSave] = []
    if run.rank.is_main and not trainer.config.debug.debug_mode and os.environ.get("AFTER_SAVE") != "off":
        for section in trainer.config.checkpoint.after_save:  # type: ignore[attr-defined]  # which this part adds
            function = AfterSave(section)
            trainer.saver.folder.after_write.append(function.add)
            functions.append(function)
        trainer.saver.at_end.append(partial(finish, functions))
    try:
        yield
    except Exception as error:
        if run.rank.is_single_process and functions:  # several end at once
            logger.error("{}: {}; before it ends, checkpoint.after_save has a little time", type(error).__name__, error)
            with suppress(KeyboardInterrupt):  # it would take the place of the error
                finish(functions, lambda: signal.SIGTERM)
        raise
