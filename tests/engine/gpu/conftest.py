"""Runs of the real programs on a device: an NVIDIA GPU where there is one, else the CPU, by the same tests.

On the CPU they show that the tests work, so that no slip in them waits for the day with a GPU.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import PICTURES
from tests.conftest import ENVIRONMENT, Runs, load, metrics
from tests.ranks import start_ranks

STRICT = ["--dist.deterministic", "strict"]
NET = ["--model", "{$REPLACE: true, type: engine.gpu.parts.Net}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, the slow ones only try the tests themselves: `make test-full` does."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow"):
            item.add_marker("full")


@dataclass(frozen=True)
class Run:
    """A run that has ended: its folder, its exit codes, and what it wrote to the terminal."""

    folder: Path
    codes: list[int | None]
    text: str

    @property
    def log(self) -> str:
        return (self.folder / "train.log").read_text()

    @property
    def notes(self) -> dict[str, Any]:
        """What the plugin has noted."""
        return json.loads((self.folder / "notes.json").read_text())

    @property
    def state(self) -> dict[str, Any]:
        return load(self.folder)

    @property
    def losses(self) -> list[float]:
        """Of each validation."""
        return [entry["values"]["loss"] for entry in metrics(self.folder, "val")]


@dataclass(frozen=True)
class Device:
    """What the tests run on, and how many there are; of CPUs, as many processes as a group of several has.

    Attributes:
        record: keeps a value by name for the file of results.
    """

    kind: str
    count: int
    runs: Runs
    record: Callable[[str, object], None]

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    def words(self, *words: str, name: str = "run", group: str = "") -> list[str]:
        """Return the command line of a small run; `group`: on all devices."""
        ids = "-1" if not self.is_gpu else "all" if group == "all" else "0"
        plugin = ["--plugins", "[engine.gpu.parts.take_notes]", *PICTURES]
        return self.runs.words("--gpu_ids", ids, *plugin, *words, name=name)

    def processes(self, group: str) -> int:
        """Return how many processes a group of this kind has. "all" of one device would prove nothing more."""
        if group == "all" and self.count < 2:
            pytest.skip(f"not run: {self.count} GPU, and it needs 2")
        return self.count if group == "all" else 1

    def end(
        self,
        *words: str,
        name: str = "run",
        group: str = "",
        setup: Any = None,
        variables: dict[str, str] | None = None,
    ) -> Run:
        """Train to the end, whichever that is. `group`: "one", a group of one process, or "all", of one per device."""
        if group == "one":
            from engine.gpu.parts import as_a_group as setup
        world = self.processes(group)
        ended = start_ranks(
            self.runs.root, world, self.words(*words, name=name, group=group), setup=setup, environment=variables
        )
        return Run(self.runs.root / name, ended.codes, "\n".join(ended.texts))

    def train(self, *words: str, name: str = "run", group: str = "", variables: dict[str, str] | None = None) -> Run:
        """Train to a good end."""
        run = self.end(*words, name=name, group=group, variables=variables)
        assert set(run.codes) == {0}, run.text
        return run

    def fail(self, *words: str, **variables: str) -> Run:
        """Train to a bad end; `text` is what a person reads."""
        run = self.end(*words, variables=variables)
        assert 0 not in run.codes, run.text
        return run


@pytest.fixture
def device(runs: Runs, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Device:
    kind = os.environ.get("GPU_TESTS_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr("tests.ranks._PATIENCE", 240.0)  # the first kernels of a process may have to be compiled
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    return Device(kind, torch.cuda.device_count() if kind == "cuda" else 2, runs, record_property)


def assert_near(first: Run, second: Run, tolerance: float) -> float:
    """Two runs have the same weights but for so much; the largest difference."""
    weights = second.state["model"]
    far = {key: float((value - weights[key]).abs().max()) for key, value in first.state["model"].items()}
    assert max(far.values()) < tolerance, far
    return max(far.values())
