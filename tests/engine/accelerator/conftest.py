"""Runs of the real programs on an emulated accelerator, which does everything as late as it may.

Each run is a process of its own: an error of a device spoils all that a process does later.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.accelerator.build import HERE, CannotBuild, built
from engine.conftest import PICTURES
from tests.conftest import ENVIRONMENT, PROJECT, Runs, metrics

# Of the CPU's run: its generator, and a choice that optimizers make by the kind of device.
OF_THE_DEVICE = (".emu", ".foreach")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def emulator() -> Path:
    """The compiled emulator; the tests are skipped where it cannot be built, but never in CI (REQUIRE_REAL)."""
    try:
        return built(torch.__version__)
    except CannotBuild as error:
        if os.environ.get("REQUIRE_REAL"):
            pytest.fail(f"REQUIRE_REAL is set, but: {error}")
        pytest.skip(str(error))


@dataclass(frozen=True)
class Accelerator:
    """Starts programs of the project on devices 0 and 1 of the emulator; or, on device -1, on the CPU."""

    runs: Runs
    emulator: Path

    def call(self, *command: str, mode: str = "lazy", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program to its end."""
        path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(HERE), str(self.emulator)])
        environment = {**ENVIRONMENT, "PYTHONPATH": path, "EMU_MODE": mode, "EMU_PROJECT": str(PROJECT), **variables}
        return subprocess.run(
            [sys.executable, *command], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip

    def good(self, *command: str, mode: str = "lazy", **variables: str) -> str:
        """Run a Python program to a good end; what it has printed."""
        ended = self.call(*command, mode=mode, **variables)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def bad(self, *words: str, on: str = "0", **variables: str) -> str:
        """Train to a bad end; what a person reads, in one line."""
        ended = self.call("train.py", *self.runs.words("--gpu_ids", on, *PICTURES, *words), **variables)
        assert ended.returncode != 0, ended.stdout + ended.stderr
        return " ".join((ended.stdout + ended.stderr).split())

    def train(self, *words: str, name: str = "run", on: str = "0", mode: str = "lazy", **variables: str) -> Path:
        """Train to a good end; the folder of the run."""
        self.good("train.py", *self.runs.words("--gpu_ids", on, *PICTURES, *words, name=name), mode=mode, **variables)
        return self.runs.root / name


@pytest.fixture
def accelerator(runs: Runs, emulator: Path) -> Accelerator:
    return Accelerator(runs, emulator)


def differing(first: Path, second: Path, ignored: Sequence[str] = ()) -> list[str]:
    """Return what differs in the checkpoints and measured values of two runs, by name; nothing: all bits are the same.

    `ignored`: parts of names. Where and how a run was made is never compared.
    """
    names = sorted(file.name for file in (first / "checkpoints").glob("*.pt"))
    assert names == sorted(file.name for file in (second / "checkpoints").glob("*.pt"))
    found = [] if measured(first) == measured(second) else ["measured values"]
    for name in names:
        one, other = (dict(leaves(read(folder / "checkpoints" / name))) for folder in (first, second))
        for key in sorted(one.keys() | other.keys()):
            if key.startswith(("about.", "fingerprint.")) or any(part in f".{key}" for part in ignored):
                continue
            if not is_same(one.get(key), other.get(key)):
                found.append(f"{name}: {key}")
    return found


def read(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True, map_location="cpu")


def measured(folder: Path) -> list[tuple[int, Mapping[str, float]]]:
    return [(entry["step"], entry["values"]) for event in ("train", "val", "eval") for entry in metrics(folder, event)]


def leaves(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*above, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*above, str(number)))
    else:
        yield ".".join(above), value


def is_same(first: Any, second: Any) -> bool:
    """Return whether two values have the same bits. No weight and no state is NaN, which would equal itself here."""
    if not isinstance(first, torch.Tensor):
        return bool(first == second)
    if first.is_floating_point() and not first.isfinite().all():
        return False
    return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)


# ---- Waits of the host, by where the run was


@pytest.fixture
def waits(accelerator: Accelerator, tmp_path: Path) -> Callable[..., dict[str, Counter[str]]]:
    """Train, and return the waits of the host in each part of the loop: "reason  file function" with how many."""

    def call(*words: str) -> dict[str, Counter[str]]:
        plugins = "[engine.accelerator.parts.mark_waits]"
        accelerator.train("--plugins", plugins, *words, EMU_WAITS=str(tmp_path / "waits"))
        [file] = tmp_path.glob("waits.*")
        found: dict[str, Counter[str]] = {"start": Counter()}
        part = "start"
        for line in file.read_text().splitlines():
            reason, _, place = line.partition("\t")
            if reason == "now in":
                part = place
                found.setdefault(part, Counter())
            else:
                found[part][f"{reason}  {place}"] += 1
        return found

    return call
