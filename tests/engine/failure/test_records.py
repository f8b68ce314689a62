"""What a failure leaves behind, to find its cause: who holds the memory, and which exchange never ended."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.distributed import Rank
from common.monitor.profile import ProfileConfig, record_profile
from tests.conftest import PROJECT, Runs

SMALL = ["--model", "{type: tests.small.Breaks}"]


def blocks(line: str, *sizes: float, state: str = "active_allocated") -> dict[str, Any]:
    """Blocks of so many GiB in a segment of the snapshot of torch.cuda, made by a line; "" for none on record."""
    name, _, number = line.rpartition(":")
    inner = {"filename": "/python/torch/nn/modules/linear.py", "line": 7, "name": "forward"}
    frames = [inner, {"filename": f"{PROJECT}/{name}", "line": int(number), "name": "forward"}] if line else []
    return {"blocks": [{"size": int(size * 2**30), "state": state, "frames": frames} for size in sizes]}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for what torch.cuda says of a device whose memory has run out; the calls that switch recording on."""
    segments = [
        blocks("custom/models/wide_model.py:17", 6, 0.5),
        blocks("", 2),
        blocks("common/optim/optimizer.py:9", 1),
        blocks("custom/models/wide_model.py:17", 40, state="inactive"),
    ]
    calls: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.memory._snapshot", lambda: {"segments": segments})
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda name: Path(name).write_bytes(b"all of it"))
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda *words, **more: calls.append((words, more)))
    return calls


def test_who_holds_the_memory(
    runs: Runs, device: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is in use by the line that made it, the most first, in the report and in the files of the run."""
    monkeypatch.setenv("BREAKS", "memory_of_CUDA 0 train 3")
    assert runs.fail(*SMALL) == 1
    said = " ".join(capsys.readouterr().err.split())
    held = "memory held: 6.50 GiB of custom/models/wide_model.py:17, 2.00 GiB of lines that profile.memory would name, "
    assert f"{held}1.00 GiB of common/optim/optimizer.py:9" in said
    assert "CUDA out of memory" in said
    assert "smaller batch_size" in said
    assert held in (runs.root / "run" / "error_rank0.txt").read_text()
    assert (runs.root / "run" / "memory_rank0.pickle").read_bytes() == b"all of it"


def test_a_snapshot_that_fails_hides_nothing(
    runs: Runs, device: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as on a full disk."""
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda name: Path("/dev/full").write_bytes(b"all of it"))
    monkeypatch.setenv("BREAKS", "memory_of_CUDA 0 train 3")
    assert runs.fail(*SMALL) == 1
    said = capsys.readouterr().err
    assert "CUDA out of memory" in said
    assert "memory held" not in said


@pytest.mark.parametrize(("memory", "kind"), [(True, "cuda"), (True, "cpu"), (False, "cuda")])
def test_lines_are_recorded_if_asked(device: list[Any], tmp_path: Path, memory: bool, kind: str) -> None:
    """Each tensor costs 2 us then, so it is off; what is freed is forgotten."""
    with record_profile(ProfileConfig(memory=memory), tmp_path, None, Rank(device=torch.device(kind))):
        pass
    assert device == ([(("state",), {"stacks": "python"})] if memory and kind == "cuda" else [])
