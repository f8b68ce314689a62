"""YAML files and a command line -> one checked, typed, frozen configuration.

`schema` describes the sections (dataclasses defined next to their consumers), `source` reads and writes YAML, `layers`
merges files, `overrides` reads the command line, `reading` fills in references, `check` validates values against the
schema, `arguments` a free section against a signature, and `resolve` has the entry points.
"""

from common.config.overrides import option_value
from common.config.problem import ABSENT, ConfigError, Problem, shown_path
from common.config.resolve import Resolved, resolve
from common.config.schema import extensible_section, section
from common.config.source import dump
