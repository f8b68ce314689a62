"""Make a configuration from plain values: the sections of a schema, or every problem at once.

The default stands in for a wrong value, so that all further rules can still run, and no mistake hides another.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.base.parts import installed, needs, part_of
from common.config.arguments import as_list
from common.config.problem import ABSENT, Problem, is_within, join, problem_of
from common.config.schema import child, keys_of, run_checks, section_of, suggest


class Checker:
    """Checks the values of the sections below `root`.

    Attributes:
        problems: those found; first those of reading. Further problems of the same keys follow from them, and are
            omitted.
    """

    def __init__(self, root: type, problems: Sequence[Problem]) -> None:
        self.root = root
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
                rule = needs(part)
                hint = ""
            self.problems.append(Problem(place, value, rule, hint, is_unknown=True))
        try:
            section = schema(**made)
            if hasattr(section, "problems"):
                self._add([replace(problem, key=join(key, problem.key)) for problem in section.problems()])
        except (TypeError, ValueError) as error:  # a required key, `__post_init__`, or a rule about a wrong value
            if not any(problem.key.startswith(key) for problem in self.problems):
                self.problems.append(Problem(key, ABSENT, str(error)))
            return ABSENT
        return section

    def _value(self, annotation: Any, adapter: TypeAdapter[Any], value: Any, key: str) -> Any:
        """Return a value as its type has it; ABSENT if it is wrong."""
        section = section_of(annotation)
        if section is not None and isinstance(value, dict):
            return self.section(section, value, key)
        item = section_of(child(annotation, 0))
        if item is not None and isinstance(value, list):
            made = []
            for index, part in enumerate(value):
                made.append(self._value(item, TypeAdapter(item), part, join(key, index)))
            if ABSENT in made:
                return ABSENT
            return made
        value = as_list(value, annotation)
        try:
            found = adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            self.problems.append(problem_of(key, error))
            return ABSENT
        self._add(run_checks(annotation, value, key))
        return found

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
