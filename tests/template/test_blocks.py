"""Every fenced block of the pages does what it says: commands run, configs train, Python is imported, output appears.

What a block needs beside itself, and why one is not run, is in blocks.yaml.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from support import HERE, REPO, TEMPLATE, fresh
from warm import warm_python

BLOCK = re.compile(r"^( *)(```|~~~)(\S*)[^\n]*\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:#|//) (\S+\.(?:py|yaml|cpp|cu))\n")  # the first line of a block that is a file
KNOWN = yaml.safe_load((HERE / "blocks.yaml").read_text(encoding="utf-8"))
NEEDS = {"a cluster", "a GPU", "another package", "minutes", "a server"}
PAGES = [
    *(f"../{path.relative_to(REPO).as_posix()}" for path in sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md")])),
    *(path.relative_to(TEMPLATE).as_posix() for path in sorted(TEMPLATE.rglob("*.md"))),
]
CHECK_FRAGMENTS = """
import json, sys
for page, text, base, new in json.load(sys.stdin):
    names = {}
    exec(compile(text, page, "exec"), names)
    if base not in ("", "def"):
        of, fragment = eval(base, names), vars(names["Fragment"])
        unknown = [name for name in fragment if name[0] != "_" and name not in new and not hasattr(of, name)]
        assert not unknown, f"{page}: {base} has no {unknown}"
"""
SCHEMA_CHECK = """
import sys
from pathlib import Path
from common.config.reading import Reader
from common.config.source import read_file
from tests.tools.test_schema import SCHEMA, broken
for name in sys.argv[1:]:
    wrong = broken(Reader(read_file(Path(name))).values, SCHEMA)
    assert not wrong, f"{name}: {wrong}"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the entry of blocks.yaml that speaks of it."""

    page: str
    line: int
    language: str
    text: str
    entry: dict[str, Any]

    @property
    def file(self) -> str | None:
        """The path that it names in its first line."""
        named = FILE.match(self.text)
        return named[1] if named else None

    @property
    def says(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"

    @property
    def is_run(self) -> bool:
        """Whether this file runs it, which it does with all that it can unless blocks.yaml says why not."""
        if self.entry or self.page in KNOWN["elsewhere"]:
            return bool(self.entry.keys() & {"command", "options"})
        return self.language in ("sh", "yaml", "python") or self.text.startswith("$ ")


def blocks(page: str) -> list[Block]:
    text = (TEMPLATE / page).read_text(encoding="utf-8")
    known = KNOWN["blocks"].get(page, {})
    found = []
    for match in BLOCK.finditer(text):
        inside = textwrap.dedent(match[4]) if match[1] else match[4]
        entries = [entry for start, entry in known.items() if inside.startswith(start)]
        assert len(entries) <= 1, f"{page}: {inside}"
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[3], inside, entries[0] if entries else {}))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
RUN_PAGES = sorted({block.page for block in ALL if block.is_run})


def test_every_block_runs_or_says_why_not() -> None:
    """A new block that is neither a command, nor a file, nor known to blocks.yaml is refused."""
    assert len(ALL) > 150
    pages = KNOWN["elsewhere"]
    assert [block.says for block in ALL if not (block.is_run or block.entry or block.page in pages)] == []
    for page, file in pages.items():
        assert Path(page).name in (REPO / file).read_text(encoding="utf-8")
    fences = sum(len(re.findall(r"^ *(?:```|~~~)", (TEMPLATE / page).read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(ALL)  # none is written in a way that is not seen here


def test_every_entry_is_true() -> None:
    """It speaks of one block, gives a reason that we know, and names a test that exists."""
    for page, known in KNOWN["blocks"].items():
        for start in known:
            assert sum(block.text.startswith(start) for block in ALL if block.page == page) == 1, f"{page}: {start}"
    for block in ALL:
        kinds = block.entry.keys() & {"by", "command", "options", "shows", "pattern", "needs"}
        assert len(kinds) == bool(block.entry), block.says
        assert block.entry.get("needs", "a GPU") in NEEDS, block.says
        assert "pattern" not in block.entry or block.language == "python", block.says
        assert "shows" not in block.entry or block.language in ("text", "json"), block.says
        if "by" in block.entry:
            file, _, test = block.entry["by"].partition("::")
            assert f"def {test}(" in (REPO / file).read_text(encoding="utf-8"), block.says
    assert {rule.get("needs", "a GPU") for rule in KNOWN["lines"]} <= NEEDS
    lines = [line for block in ALL if block.language == "sh" for line in logical_lines(block.text)]
    assert [rule["line"] for rule in KNOWN["lines"] if not any(re.search(rule["line"], line) for line in lines)] == []


def test_python_that_is_a_pattern_names_things_that_exist(tmp_path: Path) -> None:
    """Parts of a class or of a function, with the imports of blocks.yaml: defined; names and hooks are known."""
    fragments = []
    for block in ALL:
        if "pattern" in block.entry:
            made = block.entry["pattern"] or {}
            names = "".join(f"{name} = Anything\n" for name in made.get("names", ()))
            base = made.get("inside", "")
            fragments.append(
                (block.says, f"{KNOWN['imports']}{names}{opened(block.text, base)}", base, made.get("new", ()))
            )
    assert len(fragments) > 10
    for number, (says, text, *_) in enumerate(fragments):
        (tmp_path / f"{number}.py").write_text(f"# {says}\n{text}", encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    command = [sys.executable, "-c", CHECK_FRAGMENTS]
    done = subprocess.run(command, cwd=TEMPLATE, input=json.dumps(fragments), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def opened(text: str, base: str) -> str:
    """With the head of the class or function that a block is a part of."""
    if not base:
        return text
    if base == "def":
        return "def fragment():\n" + textwrap.indent(text, "    ")
    at = re.search(r"^ ", text, re.MULTILINE)
    assert at, text
    return f"{text[: at.start()]}class Fragment({base}):\n{text[at.start() :]}"


def test_python_of_the_pages_compiles() -> None:
    for block in ALL:
        if block.language == "python" and "pattern" not in block.entry:
            indented = textwrap.dedent(re.sub(r"\A#.*\n", "", block.text))
            ast.parse(indented, block.says)


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    with warm_python() as folder:
        yield folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, settings: Path, programs: Path) -> Path:
    """A project in which one run is done. Its base config is short, so that the commands of the pages can stay."""
    root = fresh(tmp_path_factory.mktemp("out"), settings, examples="all")
    config = root / "configs" / "default.yaml"
    text = config.read_text()
    for key, value in KNOWN["short"].items():
        text, count = re.subn(rf"^(  {key}: )\S+", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert count == 1, key
    config.write_text(text)
    for number, label in enumerate(("cat", "dog", "horse") * 8):
        image = root / "data" / "photos" / label / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (10 * number, 0, 0)).save(image)
    rows = "".join(f"{n % 7},{n % 5},{n % 3},{n % 7 + n % 5}\n" for n in range(40))
    (root / "data" / "table.csv").write_text(f"a,b,c,value\n{rows}")
    for block in ALL:
        if block.is_run and block.file and "/" in block.file:
            (root / block.file).parent.mkdir(exist_ok=True)
            (root / block.file).write_text(block.text, encoding="utf-8")
    shell(root, programs, KNOWN["start"])
    return root


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_blocks_of_a_page_do_what_they_say(page: str, base: Path, programs: Path, tmp_path: Path) -> None:
    """One after the other, in a copy of the project, as a reader would; configs that no command names train too."""
    root = tmp_path / "project"
    if page.startswith("../"):
        root.mkdir()
        for path in (TEMPLATE, *(REPO / name for name in ("Makefile", "constraints.txt", "requirements-dev.txt"))):
            (root / path.name).symlink_to(path)
    else:
        shutil.copytree(base, root, symlinks=True)
    shell(root, programs, KNOWN["before"].get(page, ""))
    shown = [block for block in blocks(page) if block.is_run]
    commands = "\n".join(block.text for block in shown if block.language == "sh")
    for block in shown:
        if block.language == "yaml":
            assert block.file, block.says
            if block.file not in commands:
                shell(root, programs, f"python train.py --config {block.file} {block.entry.get('options', '')}")
        elif block.file:
            (root / block.file).write_text(block.text, encoding="utf-8")
            module = block.file.removesuffix(".py").replace("/", ".")
            shell(root, programs, f"python -c 'import {module}'")
        elif block.language == "python":
            (root / "shown.py").write_text(block.text, encoding="utf-8")
            shell(root, programs, "python shown.py")
        elif block.language == "sh":
            shell(root, programs, block.text)
        else:
            compare(block, root, programs)


@pytest.mark.slow
def test_the_schema_for_editors_knows_the_configs_of_the_pages(base: Path, programs: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(base, tmp_path / "project"))
    configs = [block.file for block in ALL if block.is_run and block.language == "yaml" and block.file]
    assert len(configs) > 15
    shell(root, programs, "python -m tools.schema")
    command = [str(programs / "python"), "-c", SCHEMA_CHECK, *configs]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def logical_lines(text: str) -> list[str]:
    """Lines as the shell sees them, without their comments."""
    return [re.sub(r"\s+#.*", "", line) for line in re.sub(r"\\\n *", "", text).splitlines()]


def substituted(line: str) -> str:
    """What is run in place of a line that cannot run here."""
    for rule in KNOWN["lines"]:
        if re.search(rule["line"], line):
            line = re.sub(rule["line"], rule.get("instead", r"\g<0>"), line) + rule.get("add", "")
    return line


def shell(root: Path, programs: Path, text: str, *, fails: bool = False) -> str:
    """Run lines as a reader's shell would, with variables of ours that bring no settings of the machine."""
    lines = "\n".join(map(substituted, logical_lines(text)))
    environment = {
        **os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "TEMPLATE": str(REPO), "GIT_CONFIG_GLOBAL": os.devnull, "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(root.parent),
        **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }  # fmt: skip
    output = root.parent / "output.txt"  # a file, which no process that is left over keeps us waiting for
    with output.open("wb") as file:
        done = subprocess.run(
            ["timeout", "--foreground", "120", "sh", "-u" if fails else "-eu", "-c", lines],
            cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    printed = output.read_text(encoding="utf-8", errors="replace")
    assert fails or done.returncode == 0, f"{done.returncode}: {lines}\n{printed[-3000:]}"
    return printed


def compare(block: Block, root: Path, programs: Path) -> None:
    """Each command of a transcript prints the lines below it, in this order; numbers and widths may differ."""
    given = block.entry.get("command")
    parts = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    for command, below in [(given, block.text)] if given else parts:
        printed = iter([like(line) for line in shell(root, programs, command, fails=True).splitlines()])
        for line in below.splitlines():
            wanted = like(line)
            assert wanted in ("", "...") or wanted in printed, f"{block.says}\nnot printed: {line}"


def like(line: str) -> str:
    """A line in which numbers and spaces are all the same."""
    line = re.sub(r"\b[0-9a-f]{7,}\b", "0", line)
    line = re.sub(r"\d[\d.,]*(?:e[-+]?\d+)?(?: [kMG]\b)?", "0", line)
    return re.sub(r"-{3,}", "---", " ".join(line.split()))
