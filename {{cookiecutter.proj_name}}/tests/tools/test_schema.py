"""The schema that is written from the config's classes, and the shipped configs, which people copy."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from common.config import resolve
from common.config.problem import ConfigError, Problem
from common.config.source import Node, read_file, scalar
from cli.program import EvalConfig
from tests.conftest import PROJECT
from tools.schema import json_schema

SCHEMA = json.loads(json.dumps(json_schema(EvalConfig)))  # as it would be written now


def test_every_config_is_right_and_fits_the_schema() -> None:
    """What an editor underlines is what the program refuses; no file in configs/ has any of it.

    A config may name a package that is not installed here, or a class that `python -m tools.schema` would add.
    """
    for path in sorted((PROJECT / "configs").glob("*.yaml")):
        assert mistakes(path) == [], path.name
        assert broken(plain(read_file(path)), SCHEMA) == [], path.name


KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def mistakes(path: Path) -> list[Problem]:
    """Return what the program refuses in a config, but for packages that are not installed."""
    try:
        resolve(EvalConfig, [path])  # which has every key of training too
    except ConfigError as error:
        return [problem for problem in error.problems if not lacks_a_package(problem)]
    return []


def lacks_a_package(problem: Problem) -> bool:
    """Return whether the value is only refused because a package is not installed."""
    found = re.search(r"No module named '(\w+)'|needs (?:the package )?(\w+), which is not installed", problem.rule)
    return found is not None and importlib.util.find_spec(found[1] or found[2]) is None


def plain(node: Node) -> Any:
    """Return a file's values as the program reads them: 3e-3 is a number."""
    if isinstance(node.value, dict):
        return {name: plain(item) for name, item in node.value.items()}
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    return node.value if node.quoted else scalar(node.value)


def broken(value: Any, rule: dict[str, Any], key: str = "") -> list[str]:
    """Keys of `value` that break a JSON schema; of that language, what ours is written in."""
    rule = {**rule, **SCHEMA["$defs"][rule["$ref"].rpartition("/")[2]]} if "$ref" in rule else rule
    found = [wrong for other in rule.get("allOf", ()) for wrong in broken(value, other, key)]
    if "if" in rule:
        found += broken(value, rule.get("else" if broken(value, rule["if"], key) else "then", {}), key)
    if ("anyOf" in rule and all(broken(value, other) for other in rule["anyOf"])) or not fits(value, rule):
        return list(dict.fromkeys([*found, key]))
    if isinstance(value, list):
        for at, item in enumerate(value):
            found += broken(item, rule.get("items", {}), f"{key}[{at}]")
    known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
    for name, item in value.items() if isinstance(value, dict) else ():
        below = f"{key}.{name}".removeprefix(".")
        if name in known or isinstance(others, dict):
            found += broken(item, known.get(name, others), below)
        elif not others:
            found.append(below)
    return list(dict.fromkeys(found))


def fits(value: Any, rule: dict[str, Any]) -> bool:
    """Return whether `value` itself, without its items, keeps a rule's plain restrictions."""
    names = rule.get("type", list(KINDS))
    kinds = tuple(kind for name in ([names] if isinstance(names, str) else names) for kind in KINDS[name])
    number = value if isinstance(value, (int, float)) else None
    return (
        isinstance(value, kinds)
        and (bool in kinds or not isinstance(value, bool))
        and ("enum" not in rule or value in rule["enum"])
        and ("const" not in rule or value == rule["const"])
        and ("pattern" not in rule or not isinstance(value, str) or bool(re.search(rule["pattern"], value)))
        and ("required" not in rule or not isinstance(value, dict) or set(rule["required"]) <= value.keys())
        and (number is None or rule.get("minimum", number) <= number <= rule.get("maximum", number))
        and (number is None or rule.get("exclusiveMinimum", number - 1) < number)
        and (number is None or number < rule.get("exclusiveMaximum", number + 1))
    )
