"""Shortened runs of the owner's config, recorded, and how two of them are compared."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from common.base.errors import UserError
from common.base.text import label
from common.config.overrides import read_options
from common.config.registry import DATASET_REGISTRY
from common.data.sections import sets_of
from common.run.paths import PROJECT
from tools.record.run import Record, first_difference, run_program, train
from tools.same.folders import compare_checkpoints, compare_rows
from custom.config import Config

T = TypeVar("T")
STEPS, SAMPLES = 9, 12  # optimizer steps of a run; samples of a step
_MOST_SAMPLES = 35  # of a dataset: the last of an epoch's three steps has 11, which no number of processes divides
_MOST_OF_STREAM = (STEPS + 2) * SAMPLES  # more than is read: where a limit cuts a stream, its own state does not end
_TOLERANCE, _NOTHING = 1e-8, 1e-12  # of fp64: relative, and what counts as zero
_SPLIT_KINDS = ("gradient", "weight", "buffer", "state")  # which do not depend on how a step's samples are split


class NotApplicable(Exception):
    """Why a check does not apply."""


@dataclass
class Lab:
    """Starts runs of the command line `words`, which has `--config`, in a temporary folder."""

    words: Sequence[str]
    config: Config
    folder: Path
    records: dict[str, Record] = field(default_factory=dict)

    def options(self) -> dict[str, str | None]:
        """Return the options of a run that takes one process, and saves after each step."""
        config, ids = self.config, self.config.gpu_ids
        device = ids[0] if isinstance(ids, list) else 0 if ids == "all" else ids
        given = {name: option.value for name, option in read_options(self.words)[0].items()}
        parts, kind = 1 if config.optim.accumulate == 1 else 2, DATASET_REGISTRY.get(config.dataset.train["type"])
        is_stream = isinstance(kind, type) and (not hasattr(kind, "__getitem__") or issubclass(kind, IterableDataset))
        return given | {
            "--batch_size": f"{SAMPLES // parts}", "--optim.accumulate": f"{parts}",
            "--progress.epoch": f"{STEPS}", "--progress.max_steps": f"{STEPS}",
            "--debug.max_samples": f"{_MOST_OF_STREAM if is_stream else _MOST_SAMPLES}",
            "--config": str(Path(given["--config"] or "").resolve()),
            "--gpu_ids": f"{device}", "--dist.processes": "null", "--dist.launcher": "none",
            "--num_workers": "0", "--prepare.compile.enabled": "false",
            "--progress.log_every": "1", "--progress.epoch_save_latest": "1step", "--progress.epoch_eval": "-1",
            "--monitor.writers": "[]", "--dir.runs_dir": str(self.folder), "--allow_changes": "true",
            "--progress.save_time": "-1", "--resume": "null",
            "--plugins": json.dumps([*config.plugins, "tools.check.watch.attach"]),
        } | ({} if device == -1 else {"--dist.deterministic": "strict"})  # fmt: skip

    def train(self, name: str, options: Mapping[str, str] = {}, *, signal: str = "", **variables: str) -> Record:
        """Train by this name, and record it; what was trained already is not trained again, only resumed."""
        if name not in self.records or "--resume" in options:
            given = {**self.options(), "--name": name, **options}
            words = [key if value is None else f"{key}={value}" for key, value in given.items()]
            env = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "CHECK_FACTS": str(self.folder / f"{name}.facts")}
            env |= variables
            self.records[name] = train(PROJECT, words, self.folder / f"{name}.record", env=env, signal=signal)
        return self.records[name]

    def cut(self, name: str, *signals: str) -> Record:
        """Train with a stop by each signal, such as SIGKILL@5, and a resume after it."""
        self.train(name, signal=signals[0])
        for signal in (*signals[1:], ""):
            record = self.train(name, {"--resume": "auto"}, signal=signal)
        return record

    def split(self, name: str, batch: int, accumulate: int = 1, processes: int = 1) -> Record:
        """Train in fp64 without dropout, where batch norms use their running statistics, with steps that are split.

        Raises:
            NotApplicable: the code does not run in fp64, or not in three parts.
        """
        if self.config.dist.is_fixed:
            raise NotApplicable("dist.reduction fixed refuses a step in three parts; compare runs")
        options = {"--batch_size": f"{batch}", "--optim.accumulate": f"{accumulate}"}
        if processes > 1:
            options |= {"--dist.launcher": "auto", "--dist.processes": f"{processes}", "--gpu_ids": "-1"}
        return self.in_fp64(
            lambda: self.train(name, options | {"--precision.mode": "fp64"}, CHECK_PLAIN="1"),
            lambda: self.train(f"{name}_as_configured", options, CHECK_PLAIN="1"),
        )

    def evaluate(self, name: str, size: int, processes: int) -> dict[str, float]:
        """Evaluate the last checkpoint of the uncut run in fp64, in batches of `size`. Returns all values by name.

        Raises:
            NotApplicable: the code does not run in fp64.
        """
        split, checkpoint = "val" if self.config.dataset.val else "eval", self.folder / "uncut/checkpoints/latest.pt"
        command = [sys.executable, "evaluate.py", f"--model_pt={checkpoint}", f"--split={split}", "--gpu_ids=-1"]
        command += [f"--dir.eval_dir={self.folder / name}", "--dist.launcher=auto", f"--dist.processes={processes}"]
        for data in sets_of(getattr(self.config.dataset, split)):
            command += [f"--dataset.{label(split, data)}.eval_batch_size={size}"]
        output = self.folder / f"{name}.txt"
        self.in_fp64(
            lambda: run_program([*command, "--precision.mode=fp64"], output, cwd=PROJECT, PYTHONHASHSEED="1"),
            lambda: run_program(command, output, cwd=PROJECT, PYTHONHASHSEED="1"),
        )
        file = next((self.folder / name).rglob("metrics.json"))
        return {key: float(value) for key, value in json.loads(file.read_text())["values"].items()}

    def in_fp64(self, run: Callable[[], T], as_configured: Callable[[], Any]) -> T:
        """Return what a run gives. If it fails, and `as_configured` does not, raise `NotApplicable`."""
        try:
            return run()
        except UserError as error:
            as_configured()  # if it fails too, that is the error
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            cause = next((line for line in lines if "Error:" in line), "".join(lines[-1:]))
            raise NotApplicable(f"the code runs, but not in fp64: {cause}") from error

    @property
    def facts(self) -> dict[str, Any]:
        """What decides which checks apply, from the uncut run."""
        facts: dict[str, Any] = json.loads((self.folder / "uncut.facts").read_text())
        return facts


def same_bits(a: Record, b: Record, skip: tuple[str, ...] = ()) -> str:
    """Compare what passed through two runs, what they measured, and their last checkpoints; "": no bit differs.

    `skip`: beginnings of names in the checkpoints that may differ.
    """
    difference = first_difference(a, b)
    if difference:
        return f"step {difference.step}: {difference}"
    _, lines = compare_rows(a.run, b.run)
    if not lines:
        _, lines = compare_checkpoints(a.run, b.run, skip)
    return " ".join(["all weights are the same, but", *map(str.strip, lines[:2])]) if lines else ""


def same_numbers(a: Record, b: Record) -> str:
    """Compare gradients, weights and states of runs that split their steps in different ways, to the last digits."""
    difference = first_difference(_rounded(a), _rounded(b), _TOLERANCE, _SPLIT_KINDS)
    return f"step {difference.step}: {difference}" if difference else ""


def _rounded(record: Record) -> Record:
    """Return rank 0's part; what is zero but for rounding, as the gradient of a key's bias, becomes zero."""
    zero = {"digest": "", "norm": 0.0, "sketch": []}
    rows = {key: row | zero if row["norm"] < _NOTHING else row for key, row in record.ranks[0].items()}
    return replace(record, ranks=[rows])
