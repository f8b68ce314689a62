"""python -m tools.checkpoint: a look into a checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.conftest import Runs, load
from tools import checkpoint as tool


def test_looking_into_a_checkpoint(runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is in it; weights alone; a damaged one is named."""
    path = runs.train() / "checkpoints" / "latest.pt"
    assert tool.main([str(path)]) == 0
    text = capsys.readouterr().out
    for piece in (
        "step 10, epoch 2",
        "all checksums right",
        "Accuracy",
        "model tests.samples.Convolution",
        "features.0.0.weight",
        "torch",
        f"  {sum(each.numel() for each in load(path.parents[1])['model'].values()):,} numbers",
    ):
        assert piece in text
    assert tool.main([str(path.parents[1])]) == 0
    assert f"{path.with_name('best.pt')}: format" in capsys.readouterr().out
    assert tool.main([str(path), "--weights", str(tmp_path / "w.pt")]) == 0
    exported = torch.load(tmp_path / "w.pt", weights_only=True)
    weight = load(path.parents[1])["model"]["head.2.weight"]
    assert torch.equal(exported["head.2.weight"], weight)
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is optional")
    assert tool.main([str(path), "--weights", str(tmp_path / "w.safetensors")]) == 0
    assert torch.equal(safetensors.load_file(tmp_path / "w.safetensors")["head.2.weight"], weight)
