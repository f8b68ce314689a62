"""Recorded runs: start them, read what `recorder.py` wrote, and find the first difference of two.

The other instruments start their programs from here too.
"""

import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

from common.base.errors import UserError
from common.base.process import die_with_parent
from common.config.arguments import as_list
from common.config.layers import find_file, flatten
from common.config.overrides import read_options
from common.config.problem import ConfigError
from common.config.reading import Reader
from common.config.source import read_text

# What must be there on both sides: of the others, a run may have more, such as outputs of modules that are new.
_NEEDED = ("gradient", "weight", "buffer", "state")
KINDS = ("random", "input", "output", "loss", "output gradient", *_NEEDED)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OUTPUT_LINES = 15
Key = tuple[int, str, str]
Row = dict[str, Any]


@dataclass
class Record:
    """What a recorded run wrote.

    Attributes:
        ranks: of each process: its rows by (step, kind, name), in order of events; of a repeated step, the last ones.
        run: the folder of the run.
    """

    ranks: list[dict[Key, Row]]
    run: Path

    @property
    def steps(self) -> int:
        """The last step."""
        return max(step for rows in self.ranks for step, _, _ in rows)


@dataclass(frozen=True)
class Difference:
    """The first difference of two records. `a` and `b` are the rows; None where a record has none.

    Attributes:
        step: optimizer step, from 1; 0: what the run began with.
        distance: |a - b| / |a|, estimated from the sketches, within a factor of two or so; infinite if unknown.
    """

    step: int
    kind: str
    name: str
    rank: int
    a: Row | None
    b: Row | None
    distance: float

    def __str__(self) -> str:
        tensor = f"{self.kind} {self.name}" + (f" on rank {self.rank}" if self.rank else "")
        if self.a is None or self.b is None:
            return f"{tensor}: only in {'B' if self.a is None else 'A'}"
        if self.a.get("type") != self.b.get("type"):
            return f"{tensor}: {self.a['type']} in A and {self.b['type']} in B"
        return tensor if self.kind == "random" else f"{tensor}: relative distance about {self.distance:.1g}"


def train(
    project: Path,
    words: Sequence[str],
    record: Path,
    *,
    env: Mapping[str, str] = {},
    step: int | None = None,
    signal: str = "",
) -> Record:
    """Run `python train.py` of a project with these words, and record it in the folder `record`.

    Without `--dir.runs_dir` and `--name` in `words`, the run is `record/run`. A further call resumes and records on, if
    the words say so.

    Args:
        words: with `--config`.
        env: further variables; its `PYTHONPATH` goes before that of this process.
        step: record this step in detail.
        signal: such as `SIGKILL@7`; any exit code is expected then.

    Raises:
        UserError: the exit code is not 0; with the last lines of its output.
    """
    output, record = record / "output.txt", record.resolve()
    record.mkdir(parents=True, exist_ok=True)
    given, problems = read_options(words)
    if problems:
        raise ConfigError(problems)
    options = {"--dir.runs_dir": str(record), "--name": "run"} | {name: item.value for name, item in given.items()}
    options["--plugins"] = json.dumps([*plugins_of(project, options), "recorder.attach"])
    command = [sys.executable, "train.py"]
    command += [name if value is None else f"{name}={value}" for name, value in options.items()]
    folders = [str(Path(__file__).parent), env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    settings = {"RECORD_DIR": str(record), "RECORD_STEP": str(step), "RECORD_SIGNAL": signal}
    variables = {**env, **settings, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    run_program(command, output, cwd=project, codes=() if signal else (0,), **variables)
    run = project / str(options["--dir.runs_dir"]) / str(options["--name"])
    return read(record, run)


def plugins_of(project: Path, options: Mapping[str, str | None]) -> list[str]:
    """Return the plugins that the options of a command line or their config name."""
    if "--plugins" in options:
        nodes = [read_text(options["--plugins"] or "", lambda line: "--plugins")]
    else:
        config = find_file("--config", options.get("--config") or "", project)
        nodes = [file.value.get("plugins") for file in flatten(config).values()]
    lists = [Reader(node).values or [] for node in nodes if node is not None]
    plugins: list[str] = as_list(lists[-1], list[str]) if lists else []
    return plugins


def run_program(
    command: Sequence[str], output: Path, *, cwd: Path | None = None, codes: Collection[int] = (0,), **variables: str
) -> None:
    """Run a program to its end, see `child_process`.

    Raises:
        UserError: its exit code is not one of `codes`, if there are any; with the last lines of its output.
    """
    with child_process(command, output, cwd, **variables) as process:
        code = process.wait()
    if codes and code not in codes:
        lines = output.read_text(errors="replace").rstrip().splitlines()[-_OUTPUT_LINES:]
        what = f"{shlex.join(command)} in {cwd or Path.cwd()} ended with exit code {code}:"
        raise UserError("\n  ".join([what, *lines]))


@contextmanager
def child_process(
    command: Sequence[str], output: Path, cwd: Path | None = None, **variables: str
) -> Iterator[Popen[bytes]]:
    """Run a program in a session of its own, which ends with the block or with this process.

    Signals are blocked while it starts: Ctrl-C would be lost there, and leave a lock behind that the next start waits
    for.

    Args:
        output: file for all that it prints.
        variables: of its environment, besides those of this process.
    """
    parent = os.getpid()

    def begin() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    variables = os.environ | {"AFTER_SAVE": "off"} | variables  # a trial publishes nothing
    options: dict[str, Any] = {"cwd": cwd, "env": variables, "stdin": DEVNULL, "stderr": STDOUT}
    options |= {"start_new_session": True, "preexec_fn": begin}
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with output.open("wb") as out, Popen(command, stdout=out, **options) as process:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            yield process
        finally:
            process.terminate()
            process.wait()


def say(line: str) -> None:
    """Print on stderr what happens next."""
    print(line, file=sys.stderr, flush=True)


def read(folder: Path, run: Path | None = None) -> Record:
    """Read the record in a folder. Raises `UserError` if there is none."""
    ranks: list[dict[Key, Row]] = []
    while (file := folder / f"rank{len(ranks)}.jsonl").is_file():
        rows: dict[Key, Row] = {}
        for line in file.read_bytes().splitlines():
            if line.startswith(b"{") and line.endswith(b"}"):  # a kill may cut one off
                row = json.loads(line)
                key = row["step"], row["kind"], row["name"]
                if row.pop("restored", False) and key in rows:
                    continue  # the step itself was recorded before what follows an update, such as Task.after_step
                rows.pop(key, None)  # a repeated one takes its place in the order of events
                rows[key] = row
        ranks.append(rows)
    if not ranks or not all(ranks):
        raise UserError(f"{folder} has no record of a training step; did the run train?")
    return Record(ranks, run or folder / "run")


def first_difference(a: Record, b: Record, tolerance: float = 0.0, kinds: Collection[str] = KINDS) -> Difference | None:
    """Return the first tensor, in order of events, that differs in the steps that both have; None if none does.

    Args:
        tolerance: the relative distance that counts as none; 0: every bit counts.
        kinds: only these are compared. Of more processes on one side, those that both have.
    """
    last, differences = min(a.steps, b.steps), list[Difference]()
    for rank, (before, after) in enumerate(zip(a.ranks, b.ranks, strict=False)):
        for step, kind, name in {**before, **after}:
            pair = before.get((step, kind, name)), after.get((step, kind, name))
            is_compared = kind in kinds and step <= last and (None not in pair or kind in _NEEDED)
            if is_compared and (gap := distance(*pair)) > tolerance:
                differences.append(Difference(step, kind, name, rank, *pair, gap))
    return min(differences, key=lambda difference: difference.step, default=None)


def distance(a: Row | None, b: Row | None) -> float:
    """Return the relative distance of two tensors by their rows: 0 for the same bits, infinite if it is unknown."""
    if a and b and a["digest"] == b["digest"]:
        return 0.0
    if not (a and b and a["norm"] and a.get("sketch") and b.get("sketch")) or a["type"] != b["type"]:
        return math.inf
    gap = math.dist(a["sketch"], b["sketch"]) / a["norm"]
    return max(gap, sys.float_info.min) if math.isfinite(gap) else math.inf  # other bits: more than 0
