"""`64,64`: a list wherever a list is expected, in fields and in arguments; refused everywhere else."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from common.config import ConfigError, resolve
from common.config.registry import MODEL_REGISTRY
import train
from tests.conftest import CONFIG, Runs, load
from custom.config import Config

BUILT = "engine.config.test_number_lists.Layers"


@pytest.fixture(autouse=True)
def _a_class_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are checked in the project's own classes."""
    monkeypatch.setattr("common.config.arguments.PROJECT", Path(__file__).parent)


class Layers(nn.Module):
    """Takes lists of numbers in every way to annotate them."""

    def __init__(
        self,
        widths: list[int] | None = None,
        size: tuple[int, int] = (1, 1),
        rates: Sequence[float] = (),
        steps: Iterable[int] = (),
        nested: list[list[int]] | None = None,
        plain=(1, 2),  # without annotation
        names: list[str] | None = None,
        text: str = "",
        either: str | list[int] = "",
        width: int = 4,
    ) -> None:
        super().__init__()
        self.given = {
            "widths": widths,
            "size": size,
            "rates": rates,
            "steps": steps,
            "plain": plain,
            "text": text,
            "names": names,
        }
        self.given["either"] = either
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


def built(*words: str) -> dict[str, Any]:
    config = resolve(Config, [CONFIG], ["--model", f"{{type: {BUILT}}}", *words]).config
    return MODEL_REGISTRY.build(config.model).given


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("widths", "64,64", [64, 64]),
        ("widths", "64,", [64]),
        ("widths", "[64, 64]", [64, 64]),
        ("widths", "-1, 2", [-1, 2]),
        ("size", "8,16", (8, 16)),
        ("rates", "0.5,1e-3", [0.5, 0.001]),
        ("steps", "1,2", [1, 2]),
        ("plain", "3,4", [3, 4]),
        ("names", "1,2", ["1", "2"]),
        ("text", "1,2", "1,2"),
        ("either", "1,2", "1,2"),
    ],
)
def test_arguments_on_the_command_line(name: str, text: str, value: Any) -> None:
    assert built(f"--model.{name}={text}")[name] == value


def test_in_a_file_with_and_without_quotes(tmp_path: Path) -> None:
    """In `{...}` a comma separates entries, so there the quotes are needed."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"$BASE: {CONFIG}\nmodel:\n  type: {BUILT}\n  widths: 64,64\n  size: '8,16'\ngpu_ids: 0,1\n")
    config = resolve(Config, [file]).config
    assert MODEL_REGISTRY.build(config.model).given["widths"] == [64, 64]
    assert MODEL_REGISTRY.build(config.model).given["size"] == (8, 16)
    assert config.gpu_ids == [0, 1]


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (
            ["--model.width", "64,64"],
            "model.width = '64,64'  (command line: --model.width 64,64)\n      must be a valid int",
        ),
        (["--model.widths", "64,x"], "model.widths[1] = 'x'"),
        (["--model.widths", "1.5,2"], "must be a valid integer"),
        (["--model.size", "1,2,3"], "at most 2 items"),
        (["--model.size", "1,"], "Field required"),
        (["--model.nested", "1,"], "must be a list"),
        (["--batch_size", "64,64"], "must be a valid integer"),
        (["--optim.lr", "0,5"], "optim.lr = '0,5'"),
        (["--num_workers", "1,"], "must be a valid integer"),
    ],
)
def test_refused_elsewhere(words: list[str], piece: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(*words)
    assert piece in str(caught.value)
    assert "has 1 problem:" in str(caught.value)


def test_arguments_of_the_optimizer(runs: Runs) -> None:
    folder = runs.train("--optim.args.betas", "0.5,0.75", "--progress.max_steps", "1")
    assert tuple(load(folder)["optimizer"]["param_groups"][0]["betas"]) == (0.5, 0.75)
    assert train.main(["--resume", str(folder), "--progress.max_steps", "2"]) == 0
