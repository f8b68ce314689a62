"""Write configs/default.yaml and configs/schema.json from the config classes: python -m tools.schema

If configs/default.yaml was edited by hand, it is left as it is.
Editors complete keys and underline mistakes by the schema.
"""

import argparse
import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from itertools import dropwhile
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
from common.data.sections import EvaluationSection, SetSection
from common.evaluation.loss import LossSections
from common.evaluation.metric import MetricSections
from common.progress import INTERVAL, IntervalIn
from common.run.paths import PROJECT
from cli.config_text import WIDTH, describe, with_comment, yaml_rows
from cli.program import EvalConfig
from custom.config import Config

Rule = dict[str, Any]

_HEADER = """Every key of the core with its default, as the config classes have it.
Your own configs begin with "$BASE: default.yaml" and contain only the differences.
"""
_CHECKSUM = "# Checksum of what was written, to notice edits: "
_EDITED = """error: {} was edited by hand, so it is left as it is. Move your edits into a config of your own that
begins with "$BASE: default.yaml", delete this one, and write it again: python -m tools.schema"""
_PATHS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_BASE = {**_PATHS, "description": "file or files that this one is based on, relative to this file"}
_REPLACE = {"type": "boolean", "description": "true: replace the base's section instead of merging with it"}
_TEXT = {"type": "string", "pattern": r"\$\{|,"}
_IMPORT_PATH = {"type": "string", "pattern": r"[.:]|\$\{"}  # or a reference to another key


def files() -> dict[str, str]:
    """Return the text of each generated file, by its path in the project."""
    reference = commented_yaml(Config, Config(), _HEADER)
    return {
        "configs/default.yaml": f"{reference}\n{_CHECKSUM}{_checksum(reference)}\n",
        # The schema of evaluate.py has every key of training and two more.
        "configs/schema.json": json.dumps(json_schema(EvalConfig), indent=2) + "\n",
    }


def is_edited(text: str) -> bool:
    """Return whether a default.yaml was edited after it was written."""
    reference, _, checksum = text.rpartition(f"\n{_CHECKSUM}")
    return checksum.strip() != _checksum(reference)


def _checksum(reference: str) -> str:
    """Without the header, which names packages: renaming them is not an edit."""
    body = dropwhile(lambda line: line.startswith("# "), reference.splitlines())
    return hashlib.sha256("\n".join(body).encode()).hexdigest()[:16]


def commented_yaml(schema: type, defaults: Any, header: str) -> str:
    """YAML of `defaults`, an instance of the section `schema`, with each key's description as a comment.

    The keys of parts are left out: their pages list them.
    """
    lines = [*(f"# {line}" for line in header.splitlines()), ""]
    annotations = {dotted: key.annotation for dotted, key in walk(schema)}
    for dotted, line, is_section in yaml_rows(to_jsonable_python(defaults)):
        if part_of(dotted) is not None:
            continue
        meaning = describe(annotations[dotted]) if dotted in annotations else ""
        if not is_section:
            lines += with_comment(line, meaning)
            continue
        pad = line[: len(line) - len(line.lstrip())]
        lines += [] if pad else [""]
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")
        lines.append(line)
    return "\n".join(lines) + "\n"


class _ForEditors(GenerateJsonSchema):
    """Leaves out titles and required keys (a base may set them)."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        rule = super().dataclass_schema(schema)
        kept = {name: item for name, item in rule.items() if name not in ("title", "required")}
        return {**kept, "properties": {**rule["properties"], "$REPLACE": _REPLACE}}


def json_schema(schema: type) -> Rule:
    """Return a JSON schema for editors. A section with the `type` of a registered class has that class's arguments.

    Without a `type`, which its base may set, it has those of any registered class. An import path allows any key.
    """
    for kind in (Registered, SetSection, LossSections, MetricSections, IntervalIn):
        setattr(kind, "__get_pydantic_json_schema__", _with_marker)  # noqa: B010 - which pydantic calls
    rules: dict[Registry, Rule] = {}  # the keys of a registry's sections that are not arguments
    schema_of = _link(TypeAdapter(schema).json_schema(schema_generator=_ForEditors), rules)
    schema_of["properties"]["$BASE"] = _BASE
    entries: dict[Registry, dict[str, Rule]] = {}
    while missing := rules.keys() - entries.keys():  # arguments may be sections of further registries
        for registry in missing:
            targets = registry.entries().items()
            entries[registry] = {name: _link(_arguments(registry, target), rules) for name, target in targets}
    for registry in sorted(entries, key=lambda registry: registry.kind):
        schema_of["$defs"][registry.kind] = _section(entries[registry], rules[registry])
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema_of}


def _with_marker(marker: Any, core: Any, handler: Callable[[Any], Rule]) -> Rule:
    """Return the rule of a field's type, with what a marker beside the type requires."""
    return {**handler(core), "allOf": [_marked(marker)]}


def _marked(marker: Any) -> Rule:
    if isinstance(marker, IntervalIn):
        return {"if": {"type": "string"}, "then": {"pattern": rf"^({INTERVAL.pattern})$|\$\{{"}}
    inputs = {"type": ["object", "null"]}
    if isinstance(marker, LossSections):
        return {"additionalProperties": _entry(LOSS_REGISTRY, weight={"type": "number"}, inputs=inputs)}
    if isinstance(marker, MetricSections):
        return {"additionalProperties": _entry(METRIC_REGISTRY, inputs=inputs)}
    ignored: Rule = {name: {} for name in marker.ignore}
    if isinstance(marker, Registered):
        return _entry(marker.registry, **ignored)
    transforms = {"items": _entry(TRANSFORM_REGISTRY, key={"type": ["string", "null"]})}
    single = _entry(DATASET_REGISTRY, transforms=transforms, **ignored)
    if isinstance(marker, EvaluationSection):
        has_type = {"required": ["type"]}
        named = {"if": {"type": "object", **has_type}, "then": single}
        return {"if": has_type, "then": single, "else": {"additionalProperties": named}}
    return single


def _entry(registry: Registry, **own: Any) -> Rule:
    """Return a mark for `_link`: a section that names an entry. `own`: rules of keys that are not arguments."""
    return {"registry": registry, "own": own}


def _link(node: Any, rules: dict[Registry, Rule]) -> Any:
    """`node` with a reference in place of each section of a registry, whose own keys are added to `own`."""
    if isinstance(node, Mapping):
        if isinstance(registry := node.get("registry"), Registry):
            rules.setdefault(registry, {}).update(_link(node["own"], rules))
            return {"$ref": f"#/$defs/{registry.kind}"}
        node = {name: _link(item, rules) for name, item in node.items()}
        if isinstance(keys := node.get("properties"), Mapping):
            node["properties"] = {name: _as_written(rule) for name, rule in keys.items()}
        return node
    return [_link(item, rules) for item in node] if isinstance(node, list) else node


def _as_written(rule: Rule) -> Rule:
    """Return the rule of a key, as its values are written.

    Where only text fits, it also accepts `7` and `true`; where none does, a reference to another key, `${optim.lr}`,
    and a list in one line, `0,1`.
    """
    about: Rule = {name: rule[name] for name in ("default", "description") if name in rule}
    kinds = [_with_items(kind) for kind in rule.get("anyOf", [rule])]
    if len(kinds) == 1:
        [rule] = kinds
    else:
        rule = {**rule, "anyOf": kinds}
    if not any(_takes_text(kind) for kind in kinds):
        return {"if": {"type": "string"}, "then": {"anyOf": [rule, _TEXT]}, "else": rule, **about}
    if all(kind == {"type": "null"} or (kind.get("type") == "string" and _takes_text(kind)) for kind in kinds):
        return {"anyOf": [*kinds, {"type": ["number", "boolean"]}], **about}
    return rule


def _with_items(rule: Rule) -> Rule:
    if "items" in rule:
        return {**rule, "items": _as_written(rule["items"])}
    return rule


def _takes_text(rule: Rule) -> bool:
    kinds = rule.get("type", "string")
    return "enum" not in rule and "const" not in rule and ("string" in kinds or kinds == "object")


def _arguments(registry: Registry, target: Callable[..., Any]) -> Rule:
    named, takes_any = parameters(target)
    provided = registry.find_supplied(target)
    rules = {name: _argument(parameter) for name, parameter in named.items() if name not in provided}
    return {"properties": rules, "additionalProperties": takes_any}


def _argument(parameter: inspect.Parameter) -> Rule:
    """Return the rule of an argument; types that pydantic does not know accept anything, as in the program's check."""
    try:
        rule = TypeAdapter(parameter.annotation).json_schema(schema_generator=_ForEditors)
    except Exception:  # noqa: BLE001 - annotations can be anything
        return {}
    rule = {} if "$defs" in rule else rule
    return {"anyOf": [rule, {"type": "null"}]} if parameter.default is None else rule


def _section(entries: Mapping[str, Rule], rules: Rule) -> Rule:
    """Return a name; or a section with a name as its `type`, and arguments."""
    rules = {"type": {}, "$REPLACE": {"type": "boolean"}, **rules}
    closed = {name: {**rule, "properties": {**rules, **rule["properties"]}} for name, rule in entries.items()}
    name = {"anyOf": [{"enum": list(entries)}, _IMPORT_PATH]}
    cases = [{"if": {"properties": {"type": {"const": name}}}, "then": rule} for name, rule in closed.items()]
    known: Rule = {key: {} for rule in closed.values() for key in rule["properties"]} or rules
    is_open = any(rule["additionalProperties"] for rule in entries.values()) or not entries
    without_type = {"properties": known, "additionalProperties": is_open}
    with_type = {"properties": {"type": name}, "allOf": cases}
    section = {"if": {"required": ["type"]}, "then": with_type, "else": without_type}
    return {"if": {"type": "string"}, "then": name, "else": section}


def main(argv: list[str]) -> int:
    """Write the files. Returns the exit code: 1 if an edited file was left as it is."""
    argparse.ArgumentParser("python -m tools.schema", description=__doc__.partition(":")[0]).parse_args(argv)
    code = 0
    for name, text in files().items():
        path = PROJECT / name
        if name.endswith(".yaml") and path.exists() and is_edited(path.read_text()):
            print(_EDITED.format(name), file=sys.stderr)
            code = 1
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
