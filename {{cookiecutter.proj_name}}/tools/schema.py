"""Write configs/default.yaml and configs/schema.json from the config classes: python -m tools.schema

A configs/default.yaml with other contents is left as it is.
Editors complete keys and underline mistakes by the schema.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import to_jsonable_python

from common.base.parts import part_of
from common.config.arguments import parameters
from common.config.registry import (
    DATASET_REGISTRY,
    LOSS_REGISTRY,
    METRIC_REGISTRY,
    TRANSFORM_REGISTRY,
    Registered,
    Registry,
)
from common.config.schema import walk
from common.data.sections import SetSection
from common.evaluation.loss import LossSections
from common.evaluation.metric import MetricSections
from common.progress import INTERVAL, IntervalIn
from common.run.paths import PROJECT
from cli.config_text import WIDTH, describe, meanings, with_comment, yaml_rows
from cli.program import EvalConfig
from custom.config import Config

Rule = dict[str, Any]

_HEADER = """Every key of the core with its default, as the config classes have it.
Your own configs begin with "$BASE: default.yaml" and contain only the differences.
"""
_OTHER = """{} is not what the classes say, and left as it is: the edits may be yours. Move them into a config that
begins with "$BASE: default.yaml", delete this one, and write it again: python -m tools.schema"""
_PATHS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_BASE = {**_PATHS, "description": "file or files that this one is based on, relative to this file"}
_REPLACE = {"type": "boolean", "description": "true: replace the base's section instead of merging with it"}
_TEXT = {"type": "string", "pattern": r"\$\{|,"}
_IMPORT_PATH = {"type": "string", "pattern": r"[.:]|\$\{"}  # or a reference to another key


def files() -> dict[str, str]:
    """Return the text of each generated file, by its path in the project."""
    return {
        "configs/default.yaml": commented_yaml(Config, Config(), _HEADER),
        # The schema of evaluate.py has every key of training and two more.
        "configs/schema.json": json.dumps(json_schema(EvalConfig), indent=2) + "\n",
    }


def commented_yaml(schema: type, defaults: Any, header: str) -> str:
    """YAML of `defaults`, an instance of the section `schema`, with each key's description as a comment.

    The keys of parts are left out: their pages list them.
    """
    lines = [*(f"# {line}" for line in header.splitlines()), ""]
    keys = dict(walk(schema))
    for dotted, line, is_section in yaml_rows(to_jsonable_python(defaults)):
        if part_of(dotted) is not None:
            continue
        meaning = ""
        if dotted in keys:
            meaning = describe(dotted, keys[dotted])
        if not is_section:
            lines += with_comment(line, meaning)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        if not indent:
            lines.append("")
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(line)
    return "\n".join(lines) + "\n"


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
    """Write the files. Returns the exit code: 1 if an earlier default.yaml is left as it is."""
    argparse.ArgumentParser("python -m tools.schema", description=__doc__.partition(":")[0]).parse_args(argv)
    code = 0
    for name, text in files().items():
        path = PROJECT / name
        if name.endswith(".yaml") and path.exists() and path.read_text() != text:
            print(_OTHER.format(name), file=sys.stderr)
            code = 1
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
