"""Records numbers and pictures: in `metrics.jsonl` for programs, and with the configured writers for people."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from common.base.files import Appender, atomic_file
from common.base.text import plain
from common.config.registry import WRITER_REGISTRY


@dataclass(frozen=True)
class WriterRun:
    """The facts about a run that a writer may use.

    Attributes:
        folder: the run folder; a writer's own files go there.
        name: of the run.
        id: name and first start of the run; the same after a resume.
        config: the complete config, nested.
        resume_step: optimizer steps of the checkpoint that the run continues from; None for a new run. What an earlier
            attempt wrote about later steps is no longer true, so a writer removes or replaces it.
        attempt: 1 for a new run, plus one for every resume.
    """

    folder: Path
    name: str = ""
    id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None
    attempt: int = 1


class Writer(ABC):
    """Writes the measurements of a run to one place: TensorBoard, a table, a tracking service.

    `monitor.writers` names the classes. Each is built with `run` and the arguments in its section, at its first entry,
    and only in the main process. An error in a writer is logged once and does not end the training.
    """

    @abstractmethod
    def scalars(
        self,
        event: str,
        step: int,
        values: Mapping[str, float],
    ) -> None:
        """Numbers by name at optimizer step `step`. `event`: their group: train, val, eval, best, speed or task."""

    @abstractmethod
    def text(self, step: int, tag: str, text: str) -> None:
        """Write a text, to be shown as it is: lines and spaces have a meaning."""

    @abstractmethod
    def close(self, state: str) -> None:
        """Write everything and close. `state`: finished, stopped or failed; running if the run was cut off."""

    def image(  # noqa: B027 - optional
        self,
        step: int,
        tag: str,
        image: NDArray[np.uint8],
    ) -> None:
        """Show a picture (H, W, 3), RGB. `tag` is a name with slashes, as in view/val."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Bring everything written so far to its place; called before each checkpoint."""


class Recorder:
    """Records the measurements of a run.

    `metrics.jsonl` has one JSON object on each line, with `event` first. Each attempt of a run begins with a line
    `{"event": "run", "schema": 1, "run": ..., "attempt": ..., "resume_step": ...}`; numbers are
    `{"event": "train", "step": 12, ..., "values": {"loss": 0.25}}` in full precision. A resume removes everything after
    its step, so that no point appears twice.

    Args:
        sections: names of writers or their sections, as in the config. They are built at the first entry for them.
        texts: with which the writers begin, by tag.
    """

    def __init__(
        self,
        metrics_file: Path,
        run: WriterRun,
        sections: Sequence[str | dict[str, Any]] = (),
        texts: Mapping[str, str] | None = None,
    ) -> None:
        if run.resume_step is not None:
            _drop_after(metrics_file, run.resume_step)
        self._texts = texts or {}
        self._file = Appender(metrics_file)
        self._run = run
        self._sections = sections
        self._writers: list[tuple[Any, Writer]] | None = None  # each with its section; None before the first entry
        self._state = "running"
        self.record("run", schema=1, run=run.id, attempt=run.attempt, resume_step=run.resume_step)

    def record(self, event: str, **fields: Any) -> None:
        """Write a line of plain values to `metrics.jsonl`: a checkpoint saved, the end of the run."""
        self._state = fields.get("state", self._state)
        line = json.dumps(plain({"event": event, **fields}), allow_nan=False)
        self._file.write(f"{line}\n")

    def write(self, method: str, *arguments: Any) -> None:
        """Call a method of each writer, see `Writer`: nothing of it is in `metrics.jsonl`."""
        if self._writers is None:
            self._writers = []
            for section in self._sections:
                with _reported(section):
                    writer = WRITER_REGISTRY.build(section, run=self._run)
                    for tag, text in self._texts.items():
                        writer.text(self._run.resume_step or 0, tag, text)
                    self._writers.append((section, writer))
        self._call(method, *arguments)

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of each writer that has been built, and give up those that fail."""
        if self._writers is None:
            return
        for entry in tuple(self._writers):
            section, writer = entry
            self._writers.remove(entry)
            with _reported(section):
                getattr(writer, method)(*arguments)
                self._writers.append(entry)

    def flush(self) -> None:
        """Flush everything written so far. Call it with every checkpoint."""
        self._file.write("")
        self._call("flush")

    def close(self) -> None:
        """Flush and close; nothing can be written afterwards. Safe to call twice."""
        self._file.close()
        self._call("close", self._state)
        self._writers = []


@contextmanager
def _reported(section: str | dict[str, Any]) -> Iterator[None]:
    """Log an error of a writer: a user's class and a server can raise anything."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        name = section
        if isinstance(section, dict):
            name = section["type"]
        logger.warning(
            "writer {} failed: {}: {}; metrics.jsonl will have the numbers", name, type(error).__name__, error
        )


class NullRecorder:
    """Accepts every call of a `Recorder` and does nothing, for processes that write no files."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def drop_duplicate_loss(values: Mapping[str, float]) -> dict[str, float]:
    """`values` without a loss that duplicates the total before it, as its only part; also `name.loss` of a set."""
    shown = dict(values)
    for total, name in pairwise(values):
        if f".{total}".endswith(".loss") and values[name] == values[total]:
            del shown[name]
    return shown


def _drop_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a metrics file, atomically: a kill leaves the old file or the new one."""
    if not path.exists():
        return
    with path.open("rb") as lines, atomic_file(path) as file:
        for line in lines:
            with suppress(ValueError):  # cut off by a kill
                if json.loads(line).get("step", 0) <= step:
                    file.write(line.rstrip() + b"\n")
