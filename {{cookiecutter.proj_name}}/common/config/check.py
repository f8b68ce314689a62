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
            if name not in keys:
                self.problems.append(self._unknown(schema, key, name, value))
                continue
            found = self._value(keys[name].annotation, keys[name].adapter, value, join(key, name))
            if found is not ABSENT:
                made[name] = found
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

    def _unknown(self, schema: type, above: str, name: str, value: Any) -> Problem:
        """Return the problem of a key that its section does not have, but perhaps another section or a part."""
        key = join(above, name)
        part = part_of(key)
        if part is not None and part not in installed():
            return Problem(key, value, needs(part), is_unknown=True)
        return Problem(key, value, "unknown key", suggest(self.root, schema, above, name), is_unknown=True)

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
