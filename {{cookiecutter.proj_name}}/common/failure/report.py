"""Why a process failed, for the person who has to fix it: the error, the line, the samples."""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

import torch

from common.base.errors import UserError, with_notes
from common.base.files import PROJECT
from common.distributed import Rank

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
HINT = "hint: "  # begins a note on an error that is shown as its hint

_WIDTH = 80  # of the box around a failure
_ROOT = f"{PROJECT}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_EXCHANGES = (f"{_TORCH}distributed{os.sep}", f"{_ROOT}common{os.sep}distributed{os.sep}")
ABSENT_TITLE = "did not reach a collective in which other processes waited for it (dist.timeout)"
ABSENT_HINT = "find out why it is stuck at this line; if it was only busy, increase dist.timeout"
_CROSSED = "the processes wait in different collectives: is one called by only some of them, as under `if rank == 0`?"
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)\n +(.+)$', re.MULTILINE)
# Torch's messages on one rank after another rank has ended or stopped responding.
_CONSEQUENCE = "connection|broken pipe|socket|timed? ?out|remote process|NCCL|failed to recv|no error message|store has"


@dataclass(frozen=True)
class Failure:
    """An error as it is reported: in the log, and to the other ranks.

    Attributes:
        code: the exit code of the failing process.
        title: the error's type and message.
        trace: the whole traceback; empty for a user error, which needs none.
        source: the innermost line of the project's own code.
        during: the enclosing operations, innermost first: step, epoch, samples.
        hint: advice, from a note on the error that begins with `HINT`.
        may_follow: this looks like the consequence of another rank's failure, which is then the cause.
        is_timeout: it waited in vain for other ranks.
    """

    rank: int
    world_size: int
    code: int
    title: str
    trace: str = ""
    source: str = ""
    during: list[str] = field(default_factory=list)
    hint: str = ""
    may_follow: bool = False
    is_timeout: bool = False
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def process(self) -> str:
        """The process, and its host."""
        process = f"process {self.pid} on {self.host}"
        if self.world_size > 1:
            process = f"rank {self.rank} of {self.world_size}, {process}"
        return process

    @property
    def reason(self) -> str:
        """One line, for `status.json`."""
        first = self.title.partition("\n")[0]
        if self.during:
            first += f" ({shorten(', '.join(self.during), 120, placeholder=' ...')})"
        if self.world_size > 1:
            first = f"rank {self.rank}: {first}"
        return first

    @property
    def is_boxed(self) -> bool:
        """Whether the message is shown in a box with details, rather than by itself."""
        return self.code not in (EXIT_USER_ERROR, EXIT_INTERRUPTED)

    def text(self) -> str:
        """Everything: the traceback, then the summary, to be read first, in a box."""
        if not self.is_boxed:
            if self.world_size == 1:
                return self.title
            return f"{self.title}\n  ({self.process})"
        rows = [("at", self.source)]
        rows += [("context", note) for note in self.during]
        rows += [("process", self.process), ("hint", self.hint)]
        head = " failed "
        if self.world_size > 1:
            head = f" rank {self.rank} failed "
        lines = [self.trace, f"{head:=^{_WIDTH}}"]  # which begins in a line of its own
        lines += [f"  {line}" for line in self.title.splitlines()[:12]]
        lines += [f"  {name:<8} {text}" for name, text in rows if text]
        lines.append("=" * _WIDTH)
        return "\n".join(lines)


def describe(error: BaseException, rank: Rank) -> Failure:
    """Return the report of `error`, raised on `rank`."""
    if isinstance(error, UserError):
        return Failure(rank.rank, rank.world_size, EXIT_USER_ERROR, with_notes(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank.rank, rank.world_size, EXIT_INTERRUPTED, "interrupted; exited immediately without saving")
    trace = "".join(traceback.format_exception(error)).rstrip()
    hint = ""
    during = []
    for note in map(str, getattr(error, "__notes__", ())):
        trace = trace.replace(f"\n{note}", "")  # it is in the summary
        if not note.startswith(HINT):
            during.append(note)
        elif not hint:
            hint = note.removeprefix(HINT)
    title = _title(error)
    is_timeout = re.search("(?<!DataLoader )timed? ?out", title, re.IGNORECASE) is not None
    if "cannot be read" in title:  # a file server's
        is_timeout = False
    may_follow = re.search(_CONSEQUENCE, title, re.IGNORECASE) is not None
    if not hint and is_timeout and not rank.is_single_process:
        hint = "another rank was late or hangs; if it was legitimately busy, increase dist.timeout"
    return Failure(
        rank.rank,
        rank.world_size,
        EXIT_ERROR,
        title,
        trace,
        _source(trace),
        during,
        hint,
        may_follow,
        is_timeout,
    )


class Whereabouts(Failure):
    """What a process does while another one waits in vain, as it is reported if this process is the cause.

    The trace is the stack of its main thread; `may_follow`: it waits in an exchange too.
    """


def where_now(rank: Rank) -> Whereabouts:
    """Return what the main thread of this process does at the moment."""
    ident = threading.main_thread().ident
    stack = traceback.extract_stack(sys._current_frames()[ident or 0])
    waits = False
    for frame in reversed(stack):  # innermost first, up to the code that called torch
        waits = waits or frame.filename.startswith(_EXCHANGES) or frame.name == "_engine_run_backward"
        if not frame.filename.startswith(_TORCH):
            break
    trace = "".join(traceback.format_list(stack)).rstrip()
    return Whereabouts(
        rank.rank,
        rank.world_size,
        EXIT_ERROR,
        ABSENT_TITLE,
        trace,
        _source(trace),
        hint=ABSENT_HINT,
        may_follow=waits,
    )


def explain_timeout(failure: Failure, found: Sequence[Failure]) -> Failure:
    """Return the report of a process that waited in vain, given what the others were doing then.

    It becomes the report of one that did not come to the exchange. If all wait, in different places, it has all stacks.
    """
    trace = failure.trace
    during = [*failure.during]
    hint = failure.hint
    for there in found:
        stack = f"Stack of rank {there.rank}:\n{there.trace}"
        if not there.may_follow:
            waited = f"rank {failure.rank} waited in vain: {failure.title.splitlines()[0]}"
            return replace(there, trace=stack, during=[waited])
        trace += f"\n{stack}"
        during.append(f"rank {there.rank} waits at {there.source}")
        if there.source != failure.source:
            hint = _CROSSED
    return replace(failure, trace=trace, during=during, hint=hint)


def report_to_torchrun(text: str) -> None:
    """Write the reason to the file that torchrun reads: its own summary is the last output on the terminal.

    Of several processes, torchrun shows the one that wrote its reason first as the root cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}  # it prints py_callstack, not the message
        report = {"message": {"message": text, "extraInfo": more}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(report))


def _title(error: BaseException) -> str:
    message = str(error).strip()
    if message.startswith("Caught ") and "Original Traceback" in message:  # from a DataLoader worker
        return message.splitlines()[-1].strip()
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def _source(trace: str) -> str:
    """Return the innermost line of a traceback in the user's own code; if none, in the engine's."""
    of_user = of_engine = ""
    for path, number, function, code in _FRAME.findall(trace):
        if not path.startswith(_ROOT) or "site-packages" in path:
            continue
        line = f"{path.removeprefix(_ROOT)}:{number}, in {function}:  {code}"
        if line.startswith(("common/", "train.py", "evaluate.py", "cli/", "tools/")):
            of_engine = line
        else:
            of_user = line
    return of_user or of_engine
