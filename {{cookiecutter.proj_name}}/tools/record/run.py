"""Recorded runs: start them, read what `recorder.py` wrote, and find the first difference of two."""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.process import die_with_parent
from common.config.layers import find_file, flatten
from common.config.overrides import read_options
from common.config.problem import ConfigError
from common.config.source import plain, read_text

PLUGIN = "recorder.attach"
KINDS = ("random", "input", "output", "loss", "gradient", "weight", "buffer", "state")
# What must be there on both sides: of the others, a run may have more, such as outputs of modules that are new.
_NEEDED = ("gradient", "weight", "buffer", "state")
_OUTPUT_LINES = 15
Key = tuple[int, str, str]
Row = dict[str, Any]


@dataclass
class Record:
    """What a recorded run wrote.

    Attributes:
        ranks: of each process: its rows by (step, kind, name), in order of events; of a repeated step, the last ones.
        run: the folder of the run.
        code: the exit code; negative: the signal that ended it.
        seconds: how long the last start took.
    """

    folder: Path
    ranks: list[dict[Key, Row]]
    run: Path
    code: int = 0
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """The last step."""
        return max((key[0] for rows in self.ranks for key in rows), default=0)


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
    of_module: bool = False

    def __str__(self) -> str:
        of = "the output of " if self.kind == "gradient" and self.of_module else ""
        form = {"output": "the output of {}", "gradient": f"the gradient of {of}{{}}", "loss": "the {}"}
        what = form.get(self.kind, f"{self.kind} {{}}").format(self.name)
        what += f" on rank {self.rank}" if self.rank else ""
        if self.a is None or self.b is None:
            return f"{what}: only in {'B' if self.a is None else 'A'}"
        if self.a.get("type") != self.b.get("type"):
            return f"{what}: {self.a['type']} in A and {self.b['type']} in B"
        return what if self.kind == "random" else f"{what}: relative distance about {self.distance:.1g}"


def train(
    project: Path,
    words: Sequence[str],
    record: Path,
    *,
    env: Mapping[str, str] | None = None,
    step: int | None = None,
    signal: str = "",
    timeout: float | None = None,
) -> Record:
    """Run `python train.py` of a project with these words, and record it in the folder `record`.

    Without `--dir.runs_dir` and `--name` in `words`, the run is `record/run`. A further call resumes and records on, if
    the words say so.

    Args:
        env: further variables.
        step: record this step in detail.
        signal: such as `SIGKILL@7`; any exit code is expected then.

    Raises:
        UserError: the exit code is not 0, or the time is over; with the last lines of its output.
    """
    record.mkdir(parents=True, exist_ok=True)
    given, problems = read_options(words)
    if problems:
        raise ConfigError(problems)
    options = {name: option.value for name, option in given.items()}
    runs, name = options.setdefault("--dir.runs_dir", str(record.resolve())), options.setdefault("--name", "run")
    options["--plugins"] = json.dumps([*own_plugins(project, options), PLUGIN])
    all_words = [option if value is None else f"{option}={value}" for option, value in options.items()]
    command = [sys.executable, "train.py", *all_words]
    settings = {"RECORD_DIR": str(record.resolve()), "RECORD_STEP": str(-1 if step is None else step)}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, **settings, "RECORD_SIGNAL": signal, **(env or {})}
    started, file = time.monotonic(), record / "output.txt"
    alone: dict[str, Any] = {"start_new_session": True, "preexec_fn": partial(die_with_parent, os.getpid())}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with file.open("wb") as out:
        try:
            code = subprocess.run(
                command, cwd=project, env=variables, stdout=out, timeout=timeout, check=False, **streams, **alone
            ).returncode
        except subprocess.TimeoutExpired:
            raise UserError(f"{shlex.join(command)} in {project} did not end in {timeout:.0f} s") from None
    if code and not signal:
        lines = file.read_text(errors="replace").rstrip().splitlines()[-_OUTPUT_LINES:]
        text = "\n  ".join([f"{shlex.join(command)} in {project} ended with exit code {code}:", *lines])
        raise UserError(text)
    found = read(record, project / str(runs) / str(name))
    found.code, found.seconds = code, time.monotonic() - started
    return found


def own_plugins(project: Path, options: Mapping[str, str | None]) -> list[str]:
    """The plugins that the options of a command line or their config name, without the recorder."""
    if (given := options.get("--plugins")) is not None:
        found = [read_text(given, lambda line: "--plugins")]
    else:  # a resumed run's own config, if no other is given
        config = options.get("--config") or f"{options.get('--resume')}/config.yaml"
        found = [body.value.get("plugins") for body in flatten([find_file("--config", config, project)]).values()]
    lists = [plain(node) for node in found if node is not None]
    return [name for name in (lists[-1] if lists else None) or [] if name != PLUGIN]


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
    return Record(folder, ranks, run or folder / "run")


def first_difference(a: Record, b: Record, tolerance: float = 0.0, kinds: Collection[str] = KINDS) -> Difference | None:
    """Return the first tensor, in order of events, that differs in the steps that both records have; None if none does.

    Args:
        tolerance: the relative distance that counts as none; 0: every bit counts.
        kinds: only these are compared. Of more processes on one side, those that both have.
    """
    firsts = [_first_of_rank(rank, a, b, tolerance, kinds) for rank in range(min(len(a.ranks), len(b.ranks)))]
    return min(filter(None, firsts), key=lambda found: found.step, default=None)


def _first_of_rank(rank: int, a: Record, b: Record, tolerance: float, kinds: Collection[str]) -> Difference | None:
    before, after = a.ranks[rank], b.ranks[rank]
    outputs = {(name, step) for step, kind, name in {*before, *after} if kind == "output"}
    order = {key: None for key in [*before, *after] if key[1] in kinds and key[0] <= min(a.steps, b.steps)}
    for key in sorted(order, key=lambda key: key[0]):  # keeps the order in a step
        (step, kind, name), one, other = key, before.get(key), after.get(key)
        of_module = kind == "gradient" and (name, step) in outputs
        if one is None or other is None:
            same = kind not in _NEEDED or of_module
        else:
            same = one["digest"] == other["digest"] or 0 < tolerance >= distance(one, other)
        if not same:
            return Difference(step, kind, name, rank, one, other, distance(one, other), of_module)
    return None


def distance(a: Row | None, b: Row | None) -> float:
    """The relative distance of two tensors by their rows: infinite without an estimate, 0 for the same bits."""
    if a is None or b is None:
        return math.inf
    if a["digest"] == b["digest"]:
        return 0.0
    if "sketch" not in a or a["type"].partition(" ")[2] != b["type"].partition(" ")[2]:
        return math.inf
    gap = math.dist(a["sketch"], b["sketch"])
    return gap / a["norm"] if a["norm"] and math.isfinite(gap) else math.inf if gap else 0.0
