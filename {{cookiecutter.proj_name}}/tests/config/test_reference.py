"""The files that are written from the config's classes, and the shipped configs, which people copy."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import resolve
from common.config.source import Node, read_file
from tests.conftest import CONFIG, ENVIRONMENT, PROJECT, run
from custom.config import Config, EvalConfig
from custom.reference import files, is_edited


@pytest.mark.parametrize("name", sorted(files()))
def test_generated_files_are_current(name: str) -> None:
    """R-09, QQ-04: after a change of a config class:  python -m custom.reference. An edited default.yaml is yours."""
    text = (PROJECT / name).read_text()
    assert text == files()[name] or (name.endswith(".yaml") and is_edited(text)), "run: python -m custom.reference"


@pytest.mark.slow
def test_writing_the_files_keeps_edits(tmp_path: Path) -> None:
    """R-09: a default that changed in a class is written; a value or comment that a person changed is not undone."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("experiments", "tests", "__pycache__", ".*cache*"))
    default, engine = project / "configs" / "default.yaml", project / "common" / "evaluation" / "best.py"

    def written(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**ENVIRONMENT, "PYTHONPATH": ""}
        return run([sys.executable, "-m", "custom.reference", *words], cwd=project, env=environment)

    assert written("--force").returncode == 0
    engine.write_text(re.sub(r"(min_delta: .*\] = )[\d.]+", r"\g<1>0.25", engine.read_text()))
    assert written().returncode == 0
    assert "min_delta: 0.25 " in default.read_text()
    for text in (re.sub(r"\nworker: \d+ ", "\nworker: 3 ", default.read_text()), default.read_text() + "# mine\n"):
        default.write_text(text)
        engine.write_text(re.sub(r"(min_delta: .*\] = )[\d.]+", r"\g<1>0.75", engine.read_text()))
        refused = written()
        assert refused.returncode == 1 and "edited by hand" in refused.stderr and "Traceback" not in refused.stderr
        assert "+  min_delta: 0.75 " in refused.stdout and "--force" in refused.stderr
        assert default.read_text() == text
        assert written("--force").returncode == 0
        assert "min_delta: 0.75 " in default.read_text() and "# mine" not in default.read_text()


def test_the_default_config_shows_every_key_with_its_default(tmp_path: Path) -> None:
    """CT-06, R-09: defaults live in the classes; the file repeats each of them, so that it can be read and copied."""
    file = tmp_path / "default.yaml"
    file.write_text(files()["configs/default.yaml"])
    resolved = resolve(Config, [file])
    assert resolved.config == Config()
    assert {origin.source for origin in resolved.origins.values()} == {str(file)}


def test_every_config_is_right_and_fits_the_schema() -> None:
    """QQ-04, R-09: what an editor underlines is what the program refuses; no file in configs/ has any of it."""
    schema = json.loads((PROJECT / "configs" / "schema.json").read_text())
    for path in sorted((PROJECT / "configs").glob("*.yaml")):
        resolve(EvalConfig, [path])  # which has every key of training too
        assert broken(plain(read_file(path)), schema, schema) == [], path.name


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("optim: {lrr: 1}", "optim.lrr"),
        ("batch_size: many", "batch_size"),
        ("batch_size: 0", "batch_size"),
        ("dist: {deterministic: maybe}", "dist.deterministic"),
        ("gpu_ids: [a]", "gpu_ids"),
    ],
)
def test_the_schema_finds_mistakes(text: str, key: str, tmp_path: Path) -> None:
    """QQ-04, D-22: an unknown key, a wrong type, a value out of range, no such choice."""
    schema = json.loads((PROJECT / "configs" / "schema.json").read_text())
    assert broken(yaml.safe_load(text), schema, schema) == [key]
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        resolve(Config, [tmp_path / "mine.yaml"])


def test_every_config_in_the_readme_is_right(tmp_path: Path) -> None:
    """R-09: what the README shows can be copied."""
    shown = re.findall(r"^```yaml\n(.*?)^```$", (PROJECT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(shown) >= 3
    (tmp_path / "default.yaml").write_text(CONFIG.read_text())
    for number, text in enumerate(shown):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text if "$BASE" in text else f"$BASE: default.yaml\n{text}")
        resolve(Config, [file])


KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def plain(node: Node) -> Any:
    """A file's values as the program reads them: 3e-3 is a number."""
    if isinstance(node.value, dict):
        return {name: plain(item) for name, item in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def broken(value: Any, rule: dict[str, Any], schema: dict[str, Any], key: str = "") -> list[str]:
    """Keys of `value` that break a JSON schema; of that language, what ours is written in."""
    if "$ref" in rule:
        rule = schema["$defs"][rule["$ref"].rpartition("/")[2]]
    if "anyOf" in rule:
        return [] if any(not broken(value, other, schema) for other in rule["anyOf"]) else [key]
    kinds = KINDS[rule["type"]] if "type" in rule else (object,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and "type" in rule):
        return [key]
    if "enum" in rule and value not in rule["enum"]:
        return [key]
    if isinstance(value, (int, float)) and not (
        rule.get("minimum", value) <= value <= rule.get("maximum", value)
        and rule.get("exclusiveMinimum", value - 1) < value < rule.get("exclusiveMaximum", value + 1)
    ):
        return [key]
    if isinstance(value, list):
        return [key] if any(broken(item, rule.get("items", {}), schema) for item in value) else []
    if not isinstance(value, dict):
        return []
    known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
    found = []
    for name, item in value.items():
        below = f"{key}.{name}".removeprefix(".")
        if name in known or isinstance(others, dict):
            found += broken(item, known.get(name, others), schema, below)
        elif not others:
            found.append(below)
    return found
