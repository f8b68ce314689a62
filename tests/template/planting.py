"""Projects with one planted mistake each, and trainings that show without any tool of ours that it breaks a promise.

`planted/project` is laid over a copy of the project: a part of each kind that projects write themselves, all of which
keep the promises. Each `planted/*.diff` makes one mistake in one file; its first lines name it, the check of
tools.check that must fail, and the config to train. Those in `planted/harmless` broke it once, and must not any more.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from support import TEMPLATE

PLANTED = Path(__file__).resolve().parent / "planted"
HARMLESS = PLANTED / "harmless"
CONFIGS = ("planted", "pages", "stream")  # of the planted parts
TIMEOUT_S = 900

# For a check: the variants of a training that must give the same, as words for train.py. A word "SIGTERM@7" stands for
# a run that gets this signal after step 7 and is then resumed.
# In fp32, Adam can make another rounding as large as a mistake.
_FP64 = ["--precision.mode", "fp64"]
VARIANTS: dict[str, list[list[str]]] = {
    "resume": [[], ["SIGTERM@7"]],
    # Not in the background, so that there is a checkpoint when the signal comes.
    "kill": [["--checkpoint.background", "false"], ["--checkpoint.background", "false", "SIGKILL@8"]],
    "twice": [[], ["SIGTERM@3", "SIGTERM@8"]],
    "seed": [[], []],
    "workers": [[], ["--num_workers", "2"]],
    "processes": [_FP64, [*_FP64, "--batch_size", "16", "--dist.processes", "2"]],
    "accumulate": [_FP64, [*_FP64, "--batch_size", "8", "--optim.accumulate", "4"]],
    "evaluation": [
        [],
        ["--dataset.val.eval_batch_size", "31"],
        ["--batch_size", "16", "--dist.processes", "2"],
    ],
}
# Sums in another order differ by about 1e-6; a mistake is larger.
TOLERANCE = {"processes": 1e-4, "accumulate": 1e-4, "evaluation": 1e-4}

_CUT = '''"""A plugin: this process sends itself a signal after an optimizer step, as in CUT=SIGTERM@7."""

import os
import signal


def attach(trainer):
    name, _, step = os.environ["CUT"].partition("@")

    def cut(*_):
        if trainer.at.step + 1 == int(step or -1):
            os.kill(os.getpid(), getattr(signal, name))

    trainer.optimizer.register_step_post_hook(cut)
'''


@dataclass(frozen=True)
class Fault:
    """A mistake, as the file `diff` describes it."""

    diff: Path

    @cached_property
    def header(self) -> dict[str, str]:
        """Its `name`, what it `breaks`, the `config` and the `file`."""
        head, _, diff = self.diff.read_text(encoding="utf-8").partition("\n\n")
        name, *pairs = head.splitlines()
        file = diff.splitlines()[1].removeprefix("+++ b/")
        return {"name": name, **dict(line.split(": ") for line in pairs), "file": file}

    def plant(self, project: Path) -> None:
        """Make the mistake."""
        subprocess.run(["git", "apply", str(self.diff)], cwd=project, check=True, env=_outside(project))


def faults(folder: Path = PLANTED) -> list[Fault]:
    """Return all planted mistakes."""
    return [Fault(diff) for diff in sorted(folder.glob("*.diff"))]


def lay(project: Path, to: Path) -> Path:
    """Copy a project, and add the parts that keep the promises, and pages to read. Returns the copy."""
    shutil.copytree(project, to, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "experiments"))
    shutil.copytree(PLANTED / "project", to, dirs_exist_ok=True)
    write_pages(to / "data" / "pages")
    return to


def write_pages(folder: Path, *, backwards: bool = False) -> None:
    """Write 160 digits as files in a folder for each class; backwards: the last one first."""
    with np.load(TEMPLATE / "data" / "digits.npz") as data:
        chosen = np.flatnonzero(data["split"] == 0)[:160]
        pages = [(number, data["images"][number] / np.float32(16), data["labels"][number]) for number in chosen]
    for number, image, label in reversed(pages) if backwards else pages:
        path = folder / f"class_{label}" / f"{number:04d}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, image)


def difference(project: Path, config: str, name: str, memory: Path) -> float:
    """Train `config` in the variants of the check `name`, and return by how much their results differ.

    `memory`: a folder of a file system that lists files as they were written. The runs get copies of the data there,
    the second one written in the opposite order.
    """
    runs = []
    for number, words in enumerate(VARIANTS[name]):
        data = memory / f"data{number}"
        shutil.copytree(project / "data", data, ignore=shutil.ignore_patterns("pages"))
        write_pages(data / "pages", backwards=bool(number % 2))
        cuts = [word for word in words if word.startswith("SIG")]
        words = ["--name", f"run{number}", "--dir.data_dir", str(data), *(word for word in words if word not in cuts)]
        runs.append(train(project, config, words, cuts))
    return max(_gap(runs[0], run, weights=name != "evaluation") for run in runs[1:])


def train(project: Path, config: str, words: Sequence[str], cuts: Sequence[str] = ()) -> Path:
    """Train, stopped by each of `cuts` and resumed. Returns the run's folder. Raises `AssertionError` if it fails."""
    (project / "cut.py").write_text(_CUT)
    plugins = ["--plugins", "[custom.auto_clip.attach, cut.attach]"]
    for number, signal in enumerate((*cuts, "")):
        resume = ["--resume", "auto"] if number else []
        command = [sys.executable, "train.py", "--config", config, *plugins, *words, *resume]
        environment = {**_outside(project), "CUT": signal, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert signal or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return project / "experiments" / words[1]


def _outside(project: Path) -> dict[str, str]:
    """Return an environment in which git does not look above the project."""
    return {**os.environ, "GIT_CEILING_DIRECTORIES": str(project.parent), "PYTHONDONTWRITEBYTECODE": "1"}


def _gap(a: Path, b: Path, *, weights: bool) -> float:
    """Return the largest difference of two runs: of values of validations, and of the last weights."""
    pairs = list(_values(a, b))
    if weights:
        first, second = (torch.load(run / "checkpoints" / "latest.pt", weights_only=True)["model"] for run in (a, b))
        assert first.keys() == second.keys()
        pairs += [(float((first[name].double() - second[name].double()).norm()), 0.0) for name in first]
    return max(abs(x - y) for x, y in pairs)


def _values(a: Path, b: Path) -> Iterator[tuple[float, float]]:
    """Return the values of the validations of two runs, in pairs."""
    rows = []
    for run in (a, b):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows.append({line["step"]: line["values"] for line in lines if line["event"] == "val"})
    assert rows[0].keys() == rows[1].keys()
    assert rows[0]
    for step, values in rows[0].items():
        yield from ((value, rows[1][step][name]) for name, value in values.items())
