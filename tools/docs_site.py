"""Builds the docs site: the pages of a rendered project, and references of its config keys and programs.

    python tools/docs_site.py FOLDER

FOLDER is made anew. Needs the packages of requirements-dev.txt; nothing is fetched, neither now nor by the pages.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cookiecutter.main import cookiecutter
from markdown import Extension, Markdown
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

TEMPLATE = Path(__file__).resolve().parent.parent
NAME = "my_project"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
# Prints {"train.py": its help, ...}: each in a fork, so that torch is imported once.
HELP = """
import json, os, runpy, sys, torch
texts = {}
for words in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        sys.path[0] = os.getcwd()
        kind, _, name = words.rpartition(" ")
        sys.argv = [name, "--help"]
        run = runpy.run_module if kind else runpy.run_path
        run(name, run_name="__main__", **({"alter_sys": True} if kind else {}))
        sys.exit()
    os.close(write)
    with os.fdopen(read) as file:
        texts[words] = file.read()
    assert os.wait()[1] == 0, words
print(json.dumps(texts))
"""


class Like(Extension):  # type: ignore[misc]
    """Lists and headings as on the web: two spaces are enough below a dash; anchors keep every dash."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2


def main(site: Path) -> None:
    """Render a project with everything in it, and build its site."""
    if site.exists() and any(site.iterdir()) and not (site / "search" / "search_index.json").is_file():
        sys.exit(f"{site} holds something that is no docs site; name another folder: make docs SITE=...")
    with tempfile.TemporaryDirectory() as home:
        answers = {"proj_name": NAME, "parts": "all", "examples": "all", "description": "A PyTorch project"}
        options = {"no_input": True, "output_dir": home, "default_config": True}
        project = Path(cookiecutter(str(TEMPLATE), extra_context=answers, **options))
        write(project, Path(home, "pages"), site)


def write(project: Path, pages: Path, site: Path) -> None:
    """Collect the pages of a project, write the generated ones, and build the site; a warning is an error."""
    for file in (project / "README.md", *sorted(project.glob("*/**/*.md"))):
        copy(file, project, pages)
    (pages / "reference").mkdir()
    subprocess.run([sys.executable, "-m", "tools.schema"], cwd=project, capture_output=True, check=True)
    schema = json.loads((project / "configs" / "schema.json").read_text(encoding="utf-8"))
    (pages / "reference" / "keys.md").write_text(keys_page(schema), encoding="utf-8")
    (pages / "reference" / "programs.md").write_text(programs_page(project), encoding="utf-8")
    warnings = Warnings()
    logging.getLogger("mkdocs").addHandler(warnings)
    config = pages.parent / "mkdocs.yml"
    config.write_text(f"site_name: {NAME}\n")
    with suppress(Abort):  # strict: raised for a warning, without its text
        build(load_config(str(config), **settings(pages, site)))
    if warnings.texts:
        sys.exit("\n".join(warnings.texts))


class Warnings(logging.Handler):
    """Keeps the texts of warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def copy(file: Path, project: Path, pages: Path) -> None:
    """Copy a page and the files that it names; a link to a folder leads to its page, or becomes text."""

    def linked(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        target = file.parent / unquote(match[2])
        if target.is_dir():
            assert (target / "README.md").is_file(), f"{file}: {match[2]}"
            return f"{match[1]}{match[2].rstrip('/')}/README.md{match[3]}"
        place = pages / os.path.relpath(target, project)
        if target.suffix != ".md":
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, place)
        return match[0]

    page = pages / file.relative_to(project)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(LINK.sub(linked, file.read_text(encoding="utf-8")), encoding="utf-8")


def settings(pages: Path, site: Path) -> dict[str, Any]:
    palette = [
        {
            "media": f"(prefers-color-scheme: {name})", "scheme": scheme, "primary": "indigo", "accent": "indigo",
            "toggle": {"icon": f"material/weather-{icon}", "name": f"Change to {other}"},
        }
        for name, other, scheme, icon in (("light", "dark", "default", "night"), ("dark", "light", "slate", "sunny"))
    ]  # fmt: skip
    subjects = sorted(path.relative_to(pages).as_posix() for path in pages.glob("docs/*.md"))
    parts = sorted(path.relative_to(pages).as_posix() for path in pages.glob("docs/parts/*.md"))
    programs = sorted(path.relative_to(pages).as_posix() for path in pages.glob("docs/tools/*.md"))
    more = ["custom/ops/README.md", "examples/README.md", "data/README.md"]
    return {
        "site_name": NAME,
        "docs_dir": str(pages),
        "site_dir": str(site),
        "theme": {"name": "material", "font": False, "palette": palette, "features": ["content.code.copy"]},
        "plugins": ["search"],
        "strict": True,
        "use_directory_urls": False,
        "nav": [
            {"Manual": "README.md"},
            {"Subjects": subjects},
            {"Parts": parts},
            {"Tools": programs},
            {"More": more},
            {"Reference": ["reference/keys.md", "reference/programs.md"]},
        ],
        "markdown_extensions": [
            "docs_site:Like", {"toc": {"slugify": slug, "permalink": True}}, "tables", "pymdownx.superfences",
            "pymdownx.highlight",
        ],
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
        },
    }  # fmt: skip


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def keys_page(schema: dict[str, Any]) -> str:
    """Every key by its dotted name, with its default and meaning."""
    rows = "\n".join(
        f"| `{name}` | {default} | {about} |" for name, default, about in keys(schema, schema, "") if about or default
    )
    return (
        "# Config keys\n\nEvery key that a config may have, and any of them on the command line as `--key value`. "
        "`configs/default.yaml` has the same as a file.\n\n| Key | Default | Meaning |\n|---|---|---|\n" + rows + "\n"
    )


def keys(schema: dict[str, Any], section: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, rule in section.get("properties", {}).items():
        if name.startswith("$"):
            continue
        target = rule
        if "$ref" in rule:
            target = schema["$defs"][rule["$ref"].rpartition("/")[2]]
        about = cell(rule.get("description") or target.get("description", ""))
        if "enum" in rule:
            values = "one of " + ", ".join(f"`{json.dumps(value)}`" for value in rule["enum"])
            about = f"{about}; {values}" if about else values
        yield f"{prefix}{name}", f"`{cell(json.dumps(rule['default']))}`" if "default" in rule else "", about
        yield from keys(schema, target, f"{prefix}{name}.")


def cell(text: str) -> str:
    """One line, without what a table or HTML would read as its own."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if "`" in line else line.replace("<", "&lt;")


def programs_page(project: Path) -> str:
    """What --help of each program says."""
    names = [name for name in ("train.py", "evaluate.py", "predict.py") if (project / name).exists()]
    tools = project / "tools"
    for file in sorted([*tools.glob("*.py"), *tools.glob("*/__main__.py")]):
        if '"__main__"' in file.read_text(encoding="utf-8"):  # others belong to a program
            names.append(f"-m tools.{file.relative_to(tools).parts[0].removesuffix('.py')}")
    texts = json.loads(run(project, "-c", HELP, *names))
    parts = [f"## python {name}\n\n```text\n{text.strip()}\n```\n" for name, text in texts.items()]
    return "# Programs\n\nWhat each program says for `--help`.\n\n" + "\n".join(parts)


def run(project: Path, *words: str) -> str:
    environment = {**os.environ, "COLUMNS": "110", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
