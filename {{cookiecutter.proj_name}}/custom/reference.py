"""Writes configs/default.yaml and configs/schema.json from the config's classes: python -m custom.reference"""

import json

from common.config import json_schema
from common.config.reference import commented_yaml
from custom.build import PROJECT
from custom.config import Config, EvalConfig

_HEADER = """yaml-language-server: $schema=schema.json
Every key there is, with its default. Written by python -m custom.reference, from the classes in custom/config.py.
Your own configs begin with "$BASE: default.yaml" and hold only what differs.
"""


def files() -> dict[str, str]:
    """The text of each generated file, by its path in the project."""
    return {
        "configs/default.yaml": commented_yaml(Config, Config(), _HEADER),
        # That of evaluate.py, which knows every key of training and two more.
        "configs/schema.json": json.dumps(json_schema(EvalConfig), indent=2) + "\n",
    }


if __name__ == "__main__":
    for name, text in files().items():
        (PROJECT / name).write_text(text)
        print(f"wrote {name}")
