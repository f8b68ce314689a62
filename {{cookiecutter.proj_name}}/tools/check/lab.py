"""Shortened runs of the owner's config, recorded and watched, and how two of them are compared."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from torch.utils.data import IterableDataset

from common.base.errors import UserError
from common.base.text import label
from common.config.overrides import read_options
from common.config.registry import DATASET_REGISTRY
from common.data.sections import sets_of
from common.run.paths import PROJECT
from tools.record import run as recorded
from tools.record.run import Difference, Record, first_difference
from tools.same.folders import compare_checkpoints, equal, measurements
from custom.config import Config

STEPS, SAMPLES = 9, 12  # optimizer steps of a run; samples of a step
_MOST_SAMPLES = 31  # of a data set: the last of an epoch's three steps has 7, which no number of processes divides
_MOST_OF_STREAM = (STEPS + 2) * SAMPLES  # more than is read: where a limit cuts a stream, its own state does not end
_TOLERANCE, _NOTHING = 1e-8, 1e-12  # of fp64: relative, and what counts as zero
_SPLIT_KINDS = ("gradient", "weight", "buffer", "state")  # which do not depend on how a step's samples are split
_EARLY = Path(__file__).with_name("early")


@dataclass(frozen=True)
class Finding:
    """What a check found. `step`, `kind` and `name` are those of the first tensor or value that differs."""

    why: str
    step: int | None = None
    kind: str = ""
    name: str = ""


@dataclass
class Lab:
    """Starts runs in a temporary folder, each once.

    Attributes:
        words: the owner's command line, with `--config`.
        notes: what the runs noted, see `tools.check.watch`, by name of the run.
    """

    words: Sequence[str]
    config: Config
    folder: Path
    locks: defaultdict[str, Any] = field(default_factory=partial(defaultdict, Lock))
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def size(self) -> dict[str, str]:
        """The keys that shorten a run."""
        parts = 1 if self.config.optim.accumulate == 1 else 2
        kind = DATASET_REGISTRY.get(self.config.dataset.train["type"])
        is_stream = isinstance(kind, type) and (not hasattr(kind, "__getitem__") or issubclass(kind, IterableDataset))
        return {
            "--batch_size": f"{SAMPLES // parts}", "--optim.accumulate": f"{parts}",
            "--progress.epoch": f"{STEPS}", "--progress.max_steps": f"{STEPS}",
            "--debug.max_samples": f"{_MOST_OF_STREAM if is_stream else _MOST_SAMPLES}",
        }  # fmt: skip

    def options(self) -> dict[str, str]:
        """The options of a run that takes one process, and saves after each step."""
        config = self.config
        ids = config.gpu_ids
        device = ids[0] if isinstance(ids, list) else 0 if ids == "all" else ids
        seed = 42 if config.dist.random_seed is None else config.dist.random_seed
        own = {name: option.value or "true" for name, option in read_options(self.words)[0].items()}
        return own | self.size | {
            "--config": str(Path(own["--config"]).resolve()),
            "--gpu_ids": f"{device}", "--dist.processes": "null", "--dist.launcher": "none",
            "--dist.random_seed": f"{seed}", "--num_workers": "0", "--prepare.compile.enabled": "false",
            "--progress.log_every": "1", "--progress.epoch_save_latest": "1step", "--progress.epoch_eval": "-1",
            "--monitor.writers": "[]", "--dir.runs_dir": str(self.folder), "--allow_changes": "true",
            "--progress.save_time": "-1", "--resume": "null",
            "--plugins": json.dumps([*config.plugins, "tools.check.watch.attach"]),
        } | ({} if device == -1 else {"--dist.deterministic": "strict"})  # fmt: skip

    def environment(self, name: str, more: Mapping[str, str]) -> dict[str, str]:
        """The variables of a run."""
        folders = [str(_EARLY), str(Path(recorded.__file__).parent), os.environ.get("PYTHONPATH", "")]
        usual = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        return {**usual, "CHECK_WATCH": str(self.folder / f"{name}.jsonl"), **more}

    def train(self, name: str, options: Mapping[str, str] = {}, *, signal: str = "", **variables: str) -> Record:
        """Train once by this name, and record it in a folder of that name."""
        with self.locks[name]:
            if name not in self.records or signal or "--resume" in options:
                given = self.options() | {"--name": name} | dict(options)
                words = [f"{option}={value}" for option, value in given.items()]
                env = self.environment(name, variables)
                place = self.folder / f"{name}.record"
                self.records[name] = recorded.train(PROJECT, words, place, env=env, signal=signal)
            return self.records[name]

    def cut(self, name: str, *signals: str, damaged: bool = False) -> Record:
        """Train with a stop by each signal, such as SIGKILL@5, and a resume after it."""
        for number, signal in enumerate((*signals, "")):
            if number and damaged:
                file = self.folder / name / "checkpoints" / "latest.pt"
                half = file.with_name("half")  # a new file: latest.pt may be the same as best.pt, by a hard link
                half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
                half.replace(file)
            found = self.train(name, {"--resume": "auto"} if number else {}, signal=signal)
        return found

    def plain(self, name: str, **more: str) -> Record:
        """Train in fp64 without dropout; batch norms use their running statistics."""
        options = {"--precision.mode": "fp64"} | {f"--{key.replace('__', '.')}": value for key, value in more.items()}
        return self.train(name, options, CHECK_PLAIN="1")

    def evaluate(self, name: str, size: int, processes: int) -> dict[str, float]:
        """Evaluate the last checkpoint of the uncut run in fp64, in batches of `size`. Returns all values by name."""
        split = "val" if self.config.dataset.val else "eval"
        sets = [label(split, each) for each in sets_of(getattr(self.config.dataset, split))]
        command = [sys.executable, "evaluate.py", f"--model_pt={self.folder / 'uncut/checkpoints/latest.pt'}"]
        command += [f"--dataset.{each}.eval_batch_size={size}" for each in sets]
        command += [f"--split={split}", "--precision.mode=fp64", f"--dir.eval_dir={self.folder / name}", "--gpu_ids=-1"]
        command += ["--dist.launcher=auto", f"--dist.processes={processes}"]
        env = {**os.environ, **self.environment(name, {})}
        done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"evaluate.py in batches of {size} on {processes} processes:\n{done.stderr[-1500:]}")
        file = next((self.folder / name).rglob("metrics.json"))
        return {key: float(value) for key, value in json.loads(file.read_text())["values"].items()}

    def notes(self) -> list[dict[str, Any]]:
        """What all runs noted."""
        files = sorted(self.folder.glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @property
    def facts(self) -> dict[str, Any]:
        """What decides which checks apply, from the uncut run."""
        self.train("uncut")
        return next(note for note in self.notes() if note["kind"] == "facts")


def same_bits(a: Record, b: Record) -> Finding | None:
    """Compare what passed through two runs, what they measured, and their last checkpoints; None: no bit differs."""
    if found := first_difference(a, b):
        return from_difference(found)
    before, after = measurements(a.run), measurements(b.run)
    for key in sorted({*before, *after}):
        if not equal(before.get(key), after.get(key)):
            step, event, name = key
            text = f"{event} {name} is {before.get(key)} and {after.get(key)}, though all weights are the same"
            return Finding(text, step, "value", name)
    _, lines = compare_checkpoints(a.run, b.run)
    return Finding(" ".join(line.strip() for line in lines[:2]), a.steps, "state", lines[1].strip()) if lines else None


def same_numbers(a: Record, b: Record) -> Finding | None:
    """Compare gradients, weights and states of runs that split their steps in different ways, to the last digits."""
    found = first_difference(_rounded(a), _rounded(b), _TOLERANCE, _SPLIT_KINDS)
    return from_difference(found) if found else None


def from_difference(found: Difference) -> Finding:
    """The first tensor that differs, for people and for the search of causes."""
    return Finding(str(found), found.step, found.kind, found.name)


def _rounded(record: Record) -> Record:
    """Rank 0's part of a record; what is zero but for rounding, as the gradient of a key's bias, is zero."""
    zero = {"digest": "", "norm": 0.0, "sketch": []}
    rows = {key: row | zero if row["norm"] < _NOTHING else row for key, row in record.ranks[0].items()}
    return replace(record, ranks=[rows])
