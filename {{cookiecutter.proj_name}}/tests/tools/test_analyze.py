"""python -m tools.analyze: what a model costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import UserError
from tests.conftest import CONFIG, Runs
from tools import analyze


def analyzed(tmp_path: Path, config: str | Path, *words: str) -> dict[str, Any]:
    """Return what tools.analyze writes to its json file."""
    file = tmp_path / "costs.json"
    assert analyze.main(["--config", str(config), "--json", str(file), *words]) == 0
    return json.loads(file.read_text())


def modules(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["module"]: row for row in found["modules"]}


def test_the_numbers_of_a_convolutional_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by hand: 2 * 9 * channels in * channels out for each pixel of a convolution."""
    words = [
        "--model.width",
        "4",
        "--batch",
        "2,3",
        "--prepare.freeze",
        "[features.0.*]",
    ]
    found = analyzed(tmp_path, CONFIG, *words)
    assert [each["batch"] for each in found["batches"]] == [2, 3]
    convolutions = 2 * 9 * (1 * 4 * 64 + 4 * 4 * 64 + 4 * 8 * 16)
    assert [each["flops_forward"] for each in found["batches"]] == [
        size * (convolutions + 2 * 32 * 10) for size in (2, 3)
    ]
    each = modules(found)
    assert each["features.1"]["flops_forward"] == 2 * 2 * 9 * 4 * 4 * 64
    assert each["features.0"]["parameters"] == 9 * 4 + 2 * 4
    assert each["features.0"]["trained"] == 0
    total = (36 + 8) + (9 * 16 + 8) + (9 * 32 + 16) + (32 * 10 + 10)
    assert (each["task"]["parameters"], each["task"]["trained"]) == (total, total - 44)
    median, spread = found["batches"][0]["seconds_train"]
    assert median > 0 and spread >= 0
    shown = capsys.readouterr().out
    assert f"Classification  {total:>10,}  {total - 44:>7,}" in shown


MISTAKES = {
    "batch": (["--batch", "0"], "--batch 0: must be integers above 0"),
    "too many": (["--batch", "5000"], "--batch 5000: the training data has only 1200 samples"),
    "setting": (["--optim.lrr", "1"], "did you mean optim.lr"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name: str) -> None:
    words, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        analyze.main(["--config", str(CONFIG), *words])


def test_the_config_of_a_run(runs: Runs, tmp_path: Path) -> None:
    folder = runs.train("--model.width", "6", "--progress.max_steps", "1", name="trained")
    file = tmp_path / "costs.json"
    assert analyze.main(["--config", str(folder / "config.yaml"), "--json", str(file)]) == 0
    assert modules(json.loads(file.read_text()))["features.0"]["parameters"] == 6 * 9 + 12
