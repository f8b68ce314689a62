"""configs/ops.yaml, which trains a model with an operator in it: as a user runs it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Runs, load
from tests.ops.test_training import CONFIG, start

pytestmark = pytest.mark.usefixtures("build_dir")


@pytest.mark.slow
def test_the_same_with_and_without_a_build(
    runs: Runs, build_dir: str, evaluated: Callable[..., dict[str, Any]]
) -> None:
    """Trained and evaluated by either, a model is the same but for the last digits."""
    words = [*CONFIG, "--precision.mode", "fp64"]
    first = runs.train(*words, name="built")
    done = start("train.py", *runs.words(*words, name="reference"), build_dir=str(runs.root / "empty"))
    assert done.returncode == 0, done.stderr
    second = runs.root / "reference"
    assert "scale_exp: Python reference" in (second / "train.log").read_text()
    done = start("evaluate.py", "--model_pt", str(second / "checkpoints" / "latest.pt"), build_dir="/nowhere")
    assert done.returncode == 0, done.stderr
    reference = json.loads((second / "eval" / "latest" / "metrics.json").read_text())["values"]
    assert evaluated(first / "checkpoints" / "latest.pt")["values"] == pytest.approx(reference, rel=1e-9)
    for key, value in load(first)["model"].items():
        torch.testing.assert_close(value, load(second)["model"][key], rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_a_resume_with_other_kernels(runs: Runs, build_dir: str) -> None:
    """A run on the reference that is resumed with a build is not called bit-exact."""
    libraries = [path.name for path in Path(build_dir).glob("*.so")]
    if not libraries:
        pytest.skip("nothing is built in this run")
    words = runs.words(*CONFIG, "--progress.epoch", "1")
    assert start("train.py", *words, build_dir="/nowhere").returncode == 0
    words = runs.words(*CONFIG, "--progress.epoch", "2", "--resume", "auto")
    assert start("train.py", *words, build_dir=build_dir).returncode == 0
    assert (
        f"sample-exact, not bit-exact (libraries [] -> ['{libraries[0]}'])"
        in (runs.root / "run" / "train.log").read_text()
    )


@pytest.mark.slow
def test_a_build_that_is_out_of_date_is_said(runs: Runs, build_dir: str) -> None:
    """Never loaded in silence; the warning names what to type."""
    libraries = list(Path(build_dir).glob("*.so"))
    if not libraries:
        pytest.skip("nothing is built in this run")
    stale = runs.root / "stale"
    stale.mkdir()
    (stale / "custom_ops-00000000.so").write_bytes(libraries[0].read_bytes())
    done = start("train.py", *runs.words(*CONFIG, "--progress.epoch", "1"), build_dir=str(stale))
    assert done.returncode == 0, done.stderr
    assert "out of date: a source, PyTorch, the machine or a flag has changed" in done.stderr
    assert "sh scripts/install_ops.sh" in done.stderr
    log = (runs.root / "run" / "train.log").read_text()
    assert "out of date" in log and "scale_exp: Python reference" in log
    assert os.environ["OPS_BUILD_DIR"] == build_dir
