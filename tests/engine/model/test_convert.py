"""Layers converted in the constructor of a model, by the real torchao: docs/optim.md."""

import os
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT, Runs, load, metrics


@pytest.mark.slow
def test_fp8_of_torchao_is_trained(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the page, emulated in 32 bits: it learns, and its weights have the names of an ordinary model."""
    page = (PROJECT / "docs" / "optim.md").read_text()
    (block,) = re.findall(r"```python\n(# custom/models/fp8_model.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "fp8_of_the_page.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    plain = runs.train("--progress.epoch", "2", name="plain")
    model = "{$REPLACE: true, type: fp8_of_the_page.Fp8Model, classes: 10, emulate: true}"
    fp8 = runs.train("--model", model, "--progress.epoch", "2", name="fp8")
    states = [load(folder)["model"] for folder in (plain, fp8)]
    assert states[0].keys() == states[1].keys()
    assert not torch.equal(states[0]["head.2.weight"], states[1]["head.2.weight"])
    assert {value.dtype for value in states[1].values() if value.is_floating_point()} == {torch.float32}
    first, last = [row["values"]["loss"] for row in metrics(fp8, "val")]
    assert last < first
