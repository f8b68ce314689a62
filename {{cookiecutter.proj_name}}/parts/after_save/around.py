"""Hand each saved checkpoint to the functions of `checkpoint.after_save`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from common.run_context import RunContext
from common.trainer import Trainer
from parts.after_save.calls import AfterSave


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Call them for what is saved in this block, in the main process; not in debugging, nor in trials of the tools."""
    if run.rank.is_main and not trainer.config.debug.debug_mode and os.environ.get("AFTER_SAVE") != "off":
        for section in trainer.config.checkpoint.after_save:  # type: ignore[attr-defined]  # which this part adds
            function = AfterSave(section)
            trainer.saver.folder.after_write.append(function.add)
            trainer.saver.at_end.append(function.finish)
    try:
        yield
    except Exception:
        if run.rank.is_single_process:  # several end at once
            for finish in trainer.saver.at_end:
                finish(lambda: signal.SIGTERM)
        raise
