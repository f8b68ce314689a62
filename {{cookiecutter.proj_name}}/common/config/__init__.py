"""YAML files and a command line -> one checked, typed, frozen configuration.

`schema` reads the sections (dataclasses defined next to their consumers), `source` reads YAML, `layers` merges files,
`overrides` reads the command line, `references` follows references, `record` reads the config of an earlier run,
`check` validates the result against the schema, `arguments` a free section against a signature, `show` writes YAML, and
`resolve` holds the entry points.
"""

from common.config.overrides import option_value
from common.config.problem import ABSENT, ConfigError, Problem, shown_path
from common.config.resolve import Resolved, overlaid, resolve
from common.config.schema import nearest, section
from common.config.show import dump

__all__ = [
    "ABSENT",
    "ConfigError",
    "Problem",
    "Resolved",
    "dump",
    "nearest",
    "option_value",
    "overlaid",
    "resolve",
    "section",
    "shown_path",
]
