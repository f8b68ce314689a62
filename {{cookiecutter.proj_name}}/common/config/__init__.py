"""YAML files and a command line -> one checked, typed, frozen configuration.

`schema` reads the sections (dataclasses defined next to their consumers), `source` reads YAML, `layers` merges files,
`overrides` reads the command line, `check` validates the result against the schema, `arguments` a free section
against a signature, `show` and `reference` print, and `resolve` holds the entry points.
"""

from common.config.overrides import option_value
from common.config.problem import ABSENT, ConfigError, Problem, place
from common.config.reference import help_text
from common.config.resolve import Resolved, overlaid, parse, resolve
from common.config.schema import nearest, section
from common.config.show import dump

__all__ = [
    "ABSENT",
    "ConfigError",
    "Problem",
    "Resolved",
    "dump",
    "help_text",
    "nearest",
    "option_value",
    "overlaid",
    "parse",
    "place",
    "resolve",
    "section",
]
