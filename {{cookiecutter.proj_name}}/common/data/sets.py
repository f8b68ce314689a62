"""The data sets of a split: a single one, or several by name."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from common.config import ABSENT, Problem
from common.data.loader import DatasetSection

Sections = dict[str, Mapping[str, Any]]


def sets_of(part: Mapping[str, Any] | None) -> Sections:
    """The sets of a split by name; a single one is called "". Empty if the split is null."""
    if part is None:
        return {}
    return _named(part) or {"": part}


def _named(part: Mapping[str, Any]) -> Sections:
    """The sections in `part`; empty if it is itself the section of a data set, which has a `type`."""
    return {} if "type" in part else {name: item for name, item in part.items() if isinstance(item, Mapping)}


def label(split: str, name: str) -> str:
    """The name of a set in messages: its split, or split.name."""
    return f"{split}.{name}" if name else split


class EvaluationSection(DatasetSection):
    """Checks a split: the section of a data set, or names with such sections, `{clean: {type: DigitsDataset}}`.

    A set that is null is left out, so a config can drop a set of its base.
    """

    def editor_rule(self) -> dict[str, Any]:
        """One section with a type, or several by name."""
        one, has_type = super().editor_rule(), {"required": ["type"]}
        each = {"if": {"type": "object", **has_type}, "then": one}
        return {"if": has_type, "then": one, "else": {"additionalProperties": each}}

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if not isinstance(value, Mapping) or not _named(value):
            yield from super().check(value, key)
            return
        for name, section in value.items():
            below = f"{key}.{name}"
            if not re.fullmatch(r"[\w-]+", name):
                yield Problem(below, ABSENT, "is not a valid name for a set: use only letters, digits, _ and -")
            else:
                yield from super().check(section, below)
