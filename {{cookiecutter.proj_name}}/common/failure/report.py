"""Why a process fails, in words for the person who has to mend it: what, where in whose code, at which samples."""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from common.base.context import with_notes
from common.base.errors import UserError
from common.config.registry import REGISTRIES
from common.distributed import Rank

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT

_PROJECT = Path(__file__).resolve().parents[2]
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)\n +(.+)$', re.MULTILINE)
# What torch says on one process when another has gone, or when nobody answers any more.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|timed out|timeout|"
    r"remote process (has )?exited|NCCL (error|communicator)|failed to recv|no error message|store has gone",
    re.IGNORECASE,
)
_WITHOUT_A_WORD = "the process ended without a word"
_HINTS = (
    (
        _WITHOUT_A_WORD,
        "it was killed (by a person, by the scheduler, for want of memory: see dmesg), or something called os._exit",
    ),
    (r"DataLoader timed out", "a batch took longer than loader.timeout: raise it, or use more --worker"),
    (
        r"timed? ?out",
        "a process was late: look at where each one is; if it had honest work to do, raise dist.timeout",
    ),
    (
        r"out of memory|DefaultCPUAllocator|MemoryError|cannot allocate memory",
        "smaller batch_size (with optim.accumulate the step stays as large), precision.mode bf16, or a smaller model",
    ),
    (
        r"DataLoader worker .*killed|worker.*exited unexpectedly|bus error|shared memory",
        "a worker ran out of memory, or of /dev/shm: fewer --worker, smaller items; --worker 0 shows the true error",
    ),
    (
        r"Cannot re-initialize CUDA in forked|fork.*CUDA|CUDA error: initialization error",
        "a worker touched the GPU: load on the CPU, or set loader.start_method: forkserver",
    ),
    (
        r"mat1 and mat2|expected input|expected .* channels|size mismatch|shapes? cannot be|must match the size",
        "model.* does not fit what the data set gives; compare --print-config with the shapes above",
    ),
    (
        r"device-side assert|Target \d+ is out of bounds|index .* out of (range|bounds)",
        "often a label that is not below the model's number of classes; CUDA_LAUNCH_BLOCKING=1 shows the true line",
    ),
    (
        r"not implemented for '(Half|BFloat16)'|expected .*dtype|to have the same dtype",
        "mixed number formats: see precision.mode; --precision.mode fp32 tells whether it is that",
    ),
    (r"No space left|Disk quota", "free space where dir.expr_dir lies, or move it"),
    (r"Too many open files", "ulimit -n 4096 before the start, or fewer --worker"),
)


@dataclass(frozen=True)
class Failure:
    """An error as it is told: to the log, to the other processes, to a file.

    Attributes:
        code: what the failing process ends with.
        title: the error's type and message.
        trace: the whole traceback; empty for a mistake of the user's, which needs none.
        source: the innermost line of the project's own code.
        where: what was being done: step, epoch, samples.
        others: where the other processes were, if they were asked.
        may_follow: this looks like what other processes see when one has ended; then that one is the cause.
    """

    rank: int
    world_size: int
    code: int
    title: str
    trace: str = ""
    source: str = ""
    section: str = ""
    where: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    may_follow: bool = False
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def process(self) -> str:
        """Which one, and where."""
        which = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}, "
        return f"{which}process {self.pid} on {self.host}"

    @property
    def reason(self) -> str:
        """One line, for `status.json`."""
        first = self.title.splitlines()[0] if self.title else "unknown"
        if self.where:
            first += f" ({shorten(self.where[0], 100, placeholder=' ...')})"
        return first if self.world_size == 1 else f"rank {self.rank}: {first}"

    @property
    def is_boxed(self) -> bool:
        """Whether it needs more words than its own."""
        return self.code not in (EXIT_USER_ERROR, EXIT_INTERRUPTED)

    def summary(self, details: Path | None = None) -> str:
        """What is read first, and so is printed last."""
        if not self.is_boxed:
            return self.title if self.world_size == 1 else f"{self.title}\n  ({self.process})"
        rows = [
            ("at", self.source),
            *(("during", note) for note in self.where),
            *(("others", note) for note in self.others),
            ("config", f"section {self.section}" if self.section else ""),
            ("process", self.process),
            ("hint", hint(self.title)),
            ("details", str(details) if details is not None else ""),
        ]
        head = "failed" if self.world_size == 1 else f"rank {self.rank} failed"
        title = "\n".join(f"  {line}" for line in self.title.splitlines()[:12])
        told = "\n".join(f"  {name:<8} {text}" for name, text in rows if text)
        return f"{f' {head} ':=^100}\n{title}\n{told}\n{'':=^100}"

    def text(self, details: Path | None = None) -> str:
        """Everything: the traceback, then the summary."""
        return f"{self.trace}\n{self.summary(details)}" if self.trace else self.summary(details)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(error: BaseException, rank: Rank) -> Failure:
    """What is to be told of `error`, raised on `rank`."""
    if isinstance(error, UserError):
        elsewhere = getattr(error, "elsewhere", False)
        return Failure(rank.rank, rank.world_size, EXIT_USER_ERROR, with_notes(error), may_follow=elsewhere)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank.rank, rank.world_size, EXIT_INTERRUPTED, "interrupted: left at once, without saving")
    if isinstance(error, SystemExit):
        trace = _trace(error)
        title = f"the program was left early, by sys.exit({error.code!r})"
        code = error.code if isinstance(error.code, int) and error.code else EXIT_ERROR
        return Failure(rank.rank, rank.world_size, code, title, trace=trace, source=_innermost(trace)[1])
    trace, title = _trace(error), _title(error)
    file, source = _innermost(trace)
    return Failure(
        rank.rank,
        rank.world_size,
        EXIT_ERROR,
        title,
        trace=trace,
        source=source,
        section=_section(file),
        where=[str(note) for note in getattr(error, "__notes__", ())],
        may_follow=not rank.is_alone and _ECHO.search(title) is not None,
    )


def vanished(rank: int, world_size: int, host: str, pid: int) -> Failure:
    """For a process that ended without a word."""
    return Failure(rank, world_size, EXIT_ERROR, _WITHOUT_A_WORD, host=host, pid=pid)


def position() -> str:
    """The line of the project's own code that the main thread is in; for another thread to ask."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _innermost("".join(traceback.format_stack(frame)))[1]


def report_to_torchrun(text: str) -> None:
    """Leave the reason where torchrun looks for it: its own summary is the last thing on the terminal.

    Of several processes, torchrun shows the one that left its reason first as the root cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}  # it prints py_callstack, and not the message
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))


def hint(title: str) -> str:
    """What helps against some common errors; empty for others."""
    return next((text for pattern, text in _HINTS if re.search(pattern, title, re.IGNORECASE)), "")


def _trace(error: BaseException) -> str:
    """The traceback, without the notes, which are told in a better place."""
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    for note in getattr(error, "__notes__", ()):
        told = told.replace(f"\n{note}", "")
    return told


def _title(error: BaseException) -> str:
    message = str(error).strip()
    if message.startswith("Caught ") and "Original Traceback" in message:  # from a worker of the loader
        return message.splitlines()[-1].strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _frames(trace: str) -> Iterator[tuple[str, str]]:
    """(path from the project's root, description) of the project's own frames, outermost first."""
    for path, line, function, code in _FRAME.findall(trace):
        full = Path(path)
        if full.is_relative_to(_PROJECT):
            short = full.relative_to(_PROJECT).as_posix()
            if not short.startswith((".venv/", "venv/")):
                yield short, f"{short}:{line}, in {function}:  {code.strip()}"


def _innermost(trace: str) -> tuple[str, str]:
    """Path and description of the innermost frame of the user's own code; else of the engine's."""
    frames = list(_frames(trace))
    yours = [frame for frame in frames if "/" in frame[0] and not frame[0].startswith("common/")]
    return (yours or frames or [("", "")])[-1]


def _section(file: str) -> str:
    """The section of the config that names the code in `file`, by the file's ending."""
    return next((registry.kind for registry in REGISTRIES if file.endswith(f"_{registry.kind}.py")), "")
