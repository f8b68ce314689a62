"""Writes configs/default.yaml and configs/schema.json from the config classes: python -m custom.reference

If configs/default.yaml was edited by hand, it is left as it is and the differences are shown.
"""

import difflib
import hashlib
import json
import sys

from common.run.paths import PROJECT
from cli.config_text import commented_yaml
from cli.evaluation_folder import EvalConfig
from support.json_schema import json_schema
from custom.config import Config

_HEADER = """yaml-language-server: $schema=schema.json
Every key with its default. Written by python -m custom.reference from the classes in custom/config.py.
Your own configs begin with "$BASE: default.yaml" and contain only the differences.
"""
_CHECKSUM = "# Checksum of what was written, to notice edits: "
_EDITED = """error: {} was edited by hand, so it is left as it is; the diff above shows what would change (-: now).
Make these changes by hand; or move your edits into a config of your own that begins with "$BASE: default.yaml", and
overwrite this one: python -m custom.reference --force"""


def files() -> dict[str, str]:
    """The text of each generated file, by its path in the project."""
    reference = commented_yaml(Config, Config(), _HEADER)
    return {
        "configs/default.yaml": f"{reference}\n{_CHECKSUM}{_checksum(reference)}\n",
        # The schema of evaluate.py has every key of training and two more.
        "configs/schema.json": json.dumps(json_schema(EvalConfig), indent=2) + "\n",
    }


def is_edited(text: str) -> bool:
    """Whether a default.yaml was edited after it was written."""
    reference, _, checksum = text.rpartition(f"\n{_CHECKSUM}")
    return checksum.strip() != _checksum(reference)


def _checksum(reference: str) -> str:
    """Without the header, which names packages: renaming them is not an edit."""
    header = [f"# {line}" for line in _HEADER.splitlines()]
    body = [line for line in reference.splitlines() if line not in header]
    return hashlib.sha256("\n".join(body).encode()).hexdigest()[:16]


def main() -> int:
    """Write the files. Returns the exit code: 1 if an edited file was left as it is."""
    code = 0
    for name, text in files().items():
        path = PROJECT / name
        old = path.read_text() if path.exists() else text
        if name.endswith(".yaml") and is_edited(old) and "--force" not in sys.argv:
            print("".join(difflib.unified_diff(old.splitlines(True), text.splitlines(True), name, "from the classes")))
            print(_EDITED.format(name), file=sys.stderr)
            code = 1
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
