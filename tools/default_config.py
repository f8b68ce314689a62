"""Writes configs/default.yaml of a project from its config classes.  python tools/default_config.py [FOLDER]"""

import sys
import textwrap
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
HEADER = """# Every key of the core with its default, as the config classes have it.
# Your own configs begin with "$BASE: default.yaml" and contain only the differences.
"""


def text() -> str:
    """YAML of all defaults of the project in the path of Python, with each key's description as a comment.

    The keys of parts are left out: their pages list them.
    """
    from cli import config_text
    from cli.program import Config
    from common.base.parts import part_of
    from common.config.schema import walk
    from pydantic_core import to_jsonable_python

    lines = [HEADER]
    keys: dict[str, Any] = dict(walk(Config))
    for dotted, line, is_section in config_text.yaml_rows(to_jsonable_python(Config())):
        if part_of(dotted) is not None:
            continue
        meaning = ""
        if dotted in keys:
            meaning = config_text.describe(dotted, keys[dotted])
        if not is_section:
            lines += config_text.with_comment(line, meaning)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        if not indent:
            lines.append("")
        margin = f"{indent}# "
        lines += textwrap.wrap(meaning, config_text.WIDTH, initial_indent=margin, subsequent_indent=margin)
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(folder: str = str(REPO / "{{cookiecutter.proj_name}}")) -> int:
    sys.path.insert(0, folder)
    Path(folder, "configs", "default.yaml").write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
