"""Writes docs/features.md: what a project can do, a line for each ability and part.  python tools/features.py"""

import sys
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parent.parent
PROJECT = REPO / "{{cookiecutter.proj_name}}"
PAGE = REPO / "docs" / "features.md"
HEAD = """# What it can do

Written by `python tools/features.py` from `tools/features.yaml` and from the first line of each part. Pages are in the
project's folder. Tests break the promises behind these lines on purpose: [testing.md](testing.md).
"""


def text() -> str:
    """Return the page."""
    lines = [HEAD]
    for title, abilities in yaml.safe_load(REPO.joinpath("tools", "features.yaml").read_text("utf-8")).items():
        lines += [f"## {title}", "", "| what | how | page |", "|---|---|---|"]
        lines += [f"| {what} | {how} | {page} |" for what, how, page in abilities]
        lines.append("")
    lines += ["## Parts", "", "A project has those that its answer `parts` names.", ""]
    lines += ["| part | what | page |", "|---|---|---|"]
    for name, part in sorted(yaml.safe_load(PROJECT.joinpath("leaves.yaml").read_text("utf-8")).items()):
        pages = [file for file in part["files"] if file.endswith(".md") and "*" not in file]
        lines.append(f"| {name} | {part['about']} | {', '.join(pages)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    PAGE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
