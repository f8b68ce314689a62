"""Make a configuration from plain values: the sections of a schema, or every problem at once.

The default stands in for a wrong value, so that all further rules can still run, and no mistake hides another.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.base.parts import installed, needs_part, part_of
from common.config.arguments import as_list
from common.config.problem import ABSENT, Problem, is_within, join, problems_of
from common.config.schema import (
    adapter_of,
    child,
    items_of,
    keys_of,
    own_checks,
    run_checks,
    section_of,
    suggest,
)


class Checker:
    """Checks the values of the sections below `root`. `written`: the keys that reading found, right or wrong.

    Attributes:
        problems: those found; first those of reading. Further problems of the same keys follow from them, and are
            omitted.
    """

    def __init__(self, root: type, problems: Sequence[Problem], written: Collection[str]) -> None:
        self.root = root
        self.written = written
        self.problems = list(problems)

    def section(self, schema: type, values: dict[str, Any], key: str = "") -> Any:
        """Return the section at `key`; ABSENT if it cannot be made."""
        keys = keys_of(schema)
        made = {}
        for name, value in values.items():
            place = join(key, name)
            if name in keys:
                found = self._value(keys[name].annotation, keys[name].adapter, value, place)
                if found is not ABSENT:
                    made[name] = found
                continue
            rule = "unknown key"
            hint = suggest(self.root, schema, key, name)
            part = part_of(place)
            if part is not None and part not in installed():
                rule = needs_part(part)
                hint = ""
            self.problems.append(Problem(place, value, rule, hint, is_unknown=True))
        required = [name for name, item in keys.items() if item.default is ABSENT]
        for name in required:
            place = join(key, name)
            if name not in values and place not in self.written:
                self.problems.append(Problem(place, ABSENT, "is required"))
        if not made.keys() >= set(required):
            return ABSENT
        try:
            section = schema(**made)
            if hasattr(section, "problems"):
                self._add([replace(problem, key=join(key, problem.key)) for problem in section.problems()])
        except ValueError as error:  # `__post_init__`, or a rule about a wrong value
            known = [problem for problem in self.problems if not key or is_within(problem.key, key)]
            if not known:
                self.problems.append(Problem(key, ABSENT, str(error)))
            return ABSENT
        return section

    def _value(self, annotation: Any, adapter: TypeAdapter[Any], value: Any, key: str) -> Any:
        """Return a value as its type has it; ABSENT if it is wrong."""
        section = section_of(annotation)
        if section is not None and isinstance(value, dict):
            made = self.section(section, value, key)
        else:
            made = self._items(annotation, value, key)
        if made is ABSENT:
            return ABSENT
        value = as_list(value, annotation)
        checks = own_checks
        try:
            if made is not None:
                found = adapter.validate_python(made, strict=False)
            else:
                found = adapter.validate_json(json.dumps(value))
                checks = run_checks
        except ValidationError as error:
            self.problems.extend(problems_of(key, value, error))
            return ABSENT
        self._add(checks(annotation, value, key))
        return found

    def _items(self, annotation: Any, value: Any, key: str) -> Any:
        """Return a list or mapping of sections; None if it is none, ABSENT if an item is wrong."""
        made = {}
        for part, inner in items_of(value):
            item = child(annotation, part)
            if section_of(item) is None:
                return None
            made[part] = self._value(item, adapter_of(item), inner, join(key, part))
        if ABSENT in made.values():
            return ABSENT
        if made and isinstance(value, list):
            return list(made.values())
        return made or None

    def _add(self, more: Iterable[Problem]) -> None:
        """Add problems that do not follow from earlier ones. A mistake in a list is one of the whole list."""
        known = [problem.key.partition("[")[0] for problem in self.problems]
        for new in more:
            follows = False
            for key in known:
                if key and (is_within(new.key, key) or is_within(key, new.key)):
                    follows = True
            if new not in self.problems and not follows:
                self.problems.append(new)
