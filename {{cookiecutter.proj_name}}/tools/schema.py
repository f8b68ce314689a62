"""Write configs/schema.json from the config classes: python -m tools.schema

Editors complete keys and underline mistakes by the schema.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from common.config.arguments import parameters
from common.config.registry import (
    DATASET_REGISTRY,
    LOSS_REGISTRY,
    METRIC_REGISTRY,
    TRANSFORM_REGISTRY,
    Registered,
    Registry,
)
from common.data.sections import SetSection
from common.evaluation.loss import LossSections
from common.evaluation.metric import MetricSections
from common.progress import INTERVAL, IntervalIn
from common.run.paths import PROJECT
from cli.config_text import meanings
from cli.program import EvalConfig

Rule = dict[str, Any]

_PATHS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_BASE = {**_PATHS, "description": "file or files that this one is based on, relative to this file"}
_REPLACE = {"type": "boolean", "description": "true: replace the base's section instead of merging with it"}
_TEXT = {"type": "string", "pattern": r"\$\{|,"}
_IMPORT_PATH = {"type": "string", "pattern": r"[.:]|\$\{"}  # or a reference to another key


class _ForEditors(GenerateJsonSchema):
    """Leaves out titles and required keys (a base may set them), and accepts values as they are written.

    These are `7` and `true` for text; a reference to another key, `${optim.lr}`, and a list in one line, `0,1`.
    """

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        rule = super().generate_inner(schema)
        kind = rule.get("type")
        if "enum" in rule or "const" in rule or kind in ("integer", "number", "boolean", "array"):
            return {"anyOf": [rule, _TEXT]}
        if kind == "string":
            return {**rule, "type": ["string", "number", "boolean"]}
        return rule

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        rule = super().dataclass_schema(schema)
        del rule["title"]
        rule.pop("required", None)
        for name, text in meanings(schema["cls"]).items():
            if name in rule["properties"]:
                rule["properties"][name]["description"] = text
        rule["properties"]["$REPLACE"] = _REPLACE
        return rule


def json_schema(schema: type) -> Rule:
    """Return a JSON schema for editors. It accepts all that the program accepts, and refuses less.

    A section with the `type` of a registered class has that class's arguments, whose values are not checked.
    """
    for kind in (Registered, SetSection, LossSections, MetricSections, IntervalIn):
        setattr(kind, "__get_pydantic_json_schema__", _with_marker)  # noqa: B010 - which pydantic calls
    rule = TypeAdapter(schema).json_schema(schema_generator=_ForEditors)
    rule["properties"]["$BASE"] = _BASE
    return {"$schema": "http://json-schema.org/draft-07/schema#", **rule}


def _with_marker(marker: Any, core: Any, handler: Callable[[Any], Rule]) -> Rule:
    """Return the rule of a field's type, with what a marker beside the type requires."""
    rule = handler(core)
    rule["allOf"] = [_marked(marker)]
    return rule


def _marked(marker: Any) -> Rule:
    if isinstance(marker, IntervalIn):
        return {"if": {"type": "string"}, "then": {"pattern": rf"^({INTERVAL.pattern})$|\$\{{"}}
    if isinstance(marker, LossSections):
        return {"additionalProperties": _entry(LOSS_REGISTRY, weight={}, inputs={})}
    if isinstance(marker, MetricSections):
        return {"additionalProperties": _entry(METRIC_REGISTRY, inputs={})}
    own: Rule = {key: {} for key in marker.ignore}
    if isinstance(marker, Registered):
        return _entry(marker.registry, **own)
    transforms = {"items": _entry(TRANSFORM_REGISTRY, key={})}
    return _entry(DATASET_REGISTRY, transforms=transforms, **own)


def _entry(registry: Registry, **own: Rule) -> Rule:
    """Return the rule of a name, or of a section with a name as its `type`. `own`: keys that are not arguments."""
    entries = registry.entries()
    name = {"anyOf": [{"enum": list(entries)}, _IMPORT_PATH]}
    cases: list[Rule] = [{"if": {"type": "string"}, "then": name}]
    for key, target in entries.items():
        arguments, takes_any = parameters(target)
        supplied = registry.find_supplied(target)
        keys: Rule = {argument: {} for argument in arguments if argument not in supplied}
        keys |= {**own, "type": {}, "$REPLACE": _REPLACE}
        is_named = {"properties": {"type": {"const": key}}, "required": ["type"]}
        cases.append({"if": is_named, "then": {"properties": keys, "additionalProperties": takes_any}})
    return {"properties": {"type": name}, "allOf": cases}


def main(argv: list[str]) -> int:
    """Write the file. Returns the exit code."""
    argparse.ArgumentParser("python -m tools.schema", description=__doc__.partition(":")[0]).parse_args(argv)
    # That of evaluate.py has every key of training and two more.
    (PROJECT / "configs" / "schema.json").write_text(json.dumps(json_schema(EvalConfig), indent=2) + "\n")
    print("wrote configs/schema.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
