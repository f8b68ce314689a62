"""Curves, pictures, and texts in Weights & Biases."""

import re
from collections.abc import Mapping
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.config.registry import WRITER_REGISTRY, needs
from common.monitor.writer import Writer, WriterRun

needs("wandb")  # imported where it is used


@WRITER_REGISTRY.register("wandb")
class WandbWriter(Writer):
    """A run of Weights & Biases with the config, curves, pictures and texts.

    Its id is that of the run, so a resume continues the same one; Weights & Biases ignores steps that it has already.
    Variables such as WANDB_ENTITY and WANDB_TAGS apply.

    Args:
        run: supplied by the program.
        project: project of Weights & Biases; null: the name of the folder of the runs.
        mode: online, or offline: write to the run folder only, for `wandb sync`.
    """

    def __init__(
        self,
        run: WriterRun,
        project: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        import wandb

        self.wandb = wandb
        self.run = wandb.init(
            project=project or run.folder.resolve().parent.name,
            name=run.name,
            id=re.sub(r"[^\w-]", "-", run.id),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode=mode,
            # The terminal is the project's own, and its text is in train.log.
            settings=wandb.Settings(console="off", silent=True),
        )

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({f"{event}/{name}": value for name, value in values.items()}, step=step)

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        self.run.log({tag: self.wandb.Image(image)}, step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self.run.log({tag: self.wandb.Html(f"<pre>{escape(text)}</pre>")}, step=step)

    def close(self, state: str) -> None:
        self.run.finish(exit_code=int(state == "failed"))
