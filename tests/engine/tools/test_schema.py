"""What is written from the config's classes, and the shipped configs, which people copy."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from common.base.parts import KEYS
from common.config import resolve
from common.config.problem import ConfigError
from common.config.source import read_file
from cli.program import EvalConfig
from tests.conftest import CONFIG, PROJECT
from tests.tools.test_schema import SCHEMA, broken, mistakes, plain
from custom.config import Config

sys.path.append(str(PROJECT.parent / "tools"))
import default_config


def test_the_default_config_is_current() -> None:
    """After a change of a config class: python tools/default_config.py."""
    assert (PROJECT / "configs" / "default.yaml").read_text() == default_config.text()


def test_the_default_config_shows_every_key_with_its_default(tmp_path: Path) -> None:
    """Defaults live in the classes; the file repeats each of the core's, so that it can be read and copied."""
    file = tmp_path / "default.yaml"
    file.write_text(default_config.text())
    resolved = resolve(Config, [file])
    assert resolved.config == Config()
    missing = [key for key, origin in resolved.origins.items() if origin.rpartition(":")[0] != str(file)]
    assert [key for key in missing if not key.startswith(tuple(KEYS))] == []


def test_a_missing_package_is_no_mistake_of_a_config(tmp_path: Path) -> None:
    """Such as torchvision on the login node of a cluster. It does not hide another mistake."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"$BASE: {CONFIG}\nmodel: {{type: no_such_package.models.Net, depth: 3}}\n")
    with pytest.raises(ConfigError, match="No module named 'no_such_package'"):
        resolve(EvalConfig, [mine])
    assert mistakes(mine) == []
    mine.write_text(mine.read_text() + "optim: {lrr: 1}\nloss: {flat: {type: torch.no_such.Loss}}\n")
    assert sorted(problem.key for problem in mistakes(mine)) == ["loss.flat.type", "optim.lrr"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("optim: {lrr: 1}", "optim.lrr"),
        ("batch_size: many", "batch_size"),
        ("batch_size: 0", "batch_size"),
        ("dist: {deterministic: maybe}", "dist.deterministic"),
        ("gpu_ids: [a]", "gpu_ids"),
        ("model: {type: Nope}", "model.type"),
        ("model: {type: ConvModel, widht: 3}", "model.widht"),
        ("task: {type: Classify}", "task.type"),
        ("loss: {mine: {type: Huber}}", "loss.mine.type"),
        ("metric: {top3: {type: Accuracy, top: 3}}", "metric.top3.top"),
        ("dataset: {train: {type: DigitsDataset, transforms: [{type: Flip}]}}", "dataset.train.transforms[0].type"),
        ("loader: {order: {type: random}}", "loader.order.type"),
        ("loader: {collate: mixip}", "loader.collate"),
        ("optim: {lr_scheduler: {type: cosin}}", "optim.lr_scheduler.type"),
        ("progress: {epoch_val: 2 epcohs}", "progress.epoch_val"),
    ],
)
def test_the_schema_finds_mistakes(text: str, key: str, tmp_path: Path) -> None:
    """An unknown key, a wrong type, a value out of range, no such choice."""
    assert broken(yaml.safe_load(text), SCHEMA) == [key]
    (tmp_path / "mine.yaml").write_text(f"$BASE: {CONFIG}\n{text}")
    with pytest.raises(ValueError, match=re.escape(f"  {key}")):
        resolve(Config, [tmp_path / "mine.yaml"])


@pytest.mark.parametrize(
    "text",
    [
        "model: {$REPLACE: true, type: torch.nn.Linear, in_features: 3, out_features: 4}",
        "loss: {flat: {type: torch.nn.MSELoss, weight: 0.1, inputs: {input: output.logits, target: output.logits}}}",
        "loss: {CrossEntropyLoss: {weight: 0.5}}\nmetric: {top2: {type: Accuracy}}",
        "dataset: {train: {type: Concat, sets: [{type: DigitsDataset}, {type: DigitsDataset, shift: 2}]}, eval: null}",
        "dataset: {val: {$REPLACE: true, a: {type: DigitsDataset, eval_batch_size: 8}}}\nbest: {metric: a.loss}",
        "progress: {epoch_val: 0.5epoch, epoch_save_latest: '2 epochs', log_every: 20, epoch_eval: '-1'}",
        "optim: {lr_scheduler: {type: onecycle, warmup: 1, args: {div_factor: 5}}}",
        "num_workers: '${optim.accumulate}'\nprogress: {epoch_eval: '${progress.epoch_val}'}",
    ],
)
def test_the_schema_accepts_what_the_program_accepts(text: str, tmp_path: Path) -> None:
    """Import paths, several datasets, weights that change, intervals, references to other keys."""
    (tmp_path / "mine.yaml").write_text(f"$BASE: {CONFIG}\n{text}")
    resolve(Config, [tmp_path / "mine.yaml"])
    assert broken(yaml.safe_load(text), SCHEMA) == []


def for_editors(schema: dict[str, Any], value: Any) -> list[str]:
    """Return the keys that an editor underlines, by the package that editors' servers are tested against."""
    return [".".join(map(str, error.absolute_path)) for error in Draft7Validator(schema).iter_errors(value)]


def test_editors_accept_every_shipped_config() -> None:
    """Configs and examples, read as YAML 1.2."""
    Draft7Validator.check_schema(SCHEMA)
    paths = [*(PROJECT / "configs").glob("*.yaml"), *(PROJECT / "examples").rglob("*.yaml")]
    assert len(paths) >= 4
    assert {path.name: found for path in paths if (found := for_editors(SCHEMA, plain(read_file(path))))} == {}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("gpu_ids: 0,1", True),
        ("gpu_ids: '0, 1'", True),
        ("gpu_ids: 0,", True),
        ("gpu_ids: all", True),
        ("gpu_ids: '0'", False),
        ("plugins: a.attach,b.attach", True),
        ("plugins: a.attach", False),
        ("optim: {args: {betas: '0.9,0.95'}}", True),
        ("dataset: {train: {type: DigitsDataset, transforms: [{type: Normalize, mean: '0.5,0.5', std: '1,1'}]}}", True),
        ("optim:\n  no_decay: 0,a.*", True),
        ("optim: {no_decay: [0]}", True),
        ("init_from: {rename: [[1, 2]]}", True),
        ("name: 7", True),  # text, as it is typed
        ("dir: {data_dir: true}", True),
        ("name: [7]", False),
        ("batch_size: '8'", False),
    ],
)
def test_editors_accept_what_the_program_accepts(text: str, is_right: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"$BASE: {CONFIG}\n{text}")
    key = text.partition(":")[0]
    mistakes_of = [problem.key for problem in mistakes(tmp_path / "mine.yaml")]
    found = for_editors(SCHEMA, yaml.safe_load(text))
    assert (not mistakes_of, not found) == (is_right, is_right), (mistakes_of, found)
    assert all(each.startswith(key) for each in (*mistakes_of, *found))


def test_the_schema_is_for_editing() -> None:
    """Closed sections, each key with its description, nothing required, $BASE and $REPLACE known."""
    json.dumps(SCHEMA, allow_nan=False)
    assert {"$BASE", "$REPLACE", "name", "optim"} <= set(SCHEMA["properties"])
    assert SCHEMA["additionalProperties"] is False
    optim = SCHEMA["$defs"]["OptimConfig"]
    assert optim["properties"]["lr"]["description"].startswith("learning rate")
    assert "$REPLACE" in optim["properties"]
    assert all("required" not in rule for rule in SCHEMA["$defs"].values())
