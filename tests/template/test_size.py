"""How large and how dense the project may be. Not tested in rendered projects, whose owners may grow."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from support import REPO, TEMPLATE, Render

# Tokens of code, without comments and docstrings; lines are free, so write plain ones. "own": all Python but tests and
# examples; "files": of any kind. Each number: the limit, which is what was reached and may only fall, and the aim.
SIZE = {
    ("core", "own"): (75_000, 75_000),
    ("core", "tests"): (28_610, 32_000),
    ("core", "files"): (170, 170),
    ("usual", "own"): (104_640, 105_000),
    ("usual", "tests"): (50_940, 56_000),
    ("all", "own"): (145_500, 160_000),
    ("all", "tests"): (70_480, 74_000),
}
WORDS = {
    "README of the project": (1_800, 1_800),
    "docs/ of the project": (22_000, 22_000),
    "the template": (10_000, 10_000),
}
ANSWERS = {name: {"parts": name} for name in ("core", "usual", "all")}
# In 1,000 source lines of common/.
DENSITY = {
    "conditional expressions": (2, 15),
    "comprehensions": (17.5, 25),
    "lines above 22 tokens": (20.5, 30),
    "walrus": (0, 1),
    "tuple assignments": (0.5, 4),
}
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_project_keeps_to_its_size(render: Render, kind: str) -> None:
    found = sizes(render(**ANSWERS[kind]))
    over = {name: found[name] for (of, name), (limit, _) in SIZE.items() if of == kind and found[name] > limit}
    assert not over, f"too large: {over}"


def test_lines_are_plain() -> None:
    """What makes a line hard to read is rare in the engine."""
    texts = [file.read_text(encoding="utf-8") for file in (TEMPLATE / "common").rglob("*.py")]
    found = sum((density(text) for text in texts), Counter[str]())
    thousands = sum(map(source_lines, texts)) / 1000
    over = {name: found[name] / thousands for name, (limit, _) in DENSITY.items() if found[name] / thousands > limit}
    assert not over, f"too dense: {over}"


def test_pages_are_short() -> None:
    pages = {
        "README of the project": [TEMPLATE / "README.md"],
        "docs/ of the project": [*TEMPLATE.glob("docs/**/*.md")],
        "the template": [*REPO.glob("*.md"), *REPO.glob("docs/*.md")],
    }
    found = {name: sum(len(page.read_text("utf-8").split()) for page in some) for name, some in pages.items()}
    assert {name: words for name, words in found.items() if words > WORDS[name][0]} == {}


def test_your_room_is_yours() -> None:
    """custom/ has samples to edit, each shorter than a screen, and nothing of the engine."""
    files = [file for file in (TEMPLATE / "custom").rglob("*.py") if "ops" not in file.parts]
    lines = [source_lines(file.read_text(encoding="utf-8")) for file in files]
    assert (sum(lines) <= 500, len(files) <= 10, max(lines) <= 60) == (True, True, True)


def test_the_story_is_on_one_screen() -> None:
    """train.py, from the config to the end of training, and the loop are functions that fit a screen."""
    source = (TEMPLATE / "train.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 70
    assert longest(source) <= 45


def test_files_and_functions_are_short() -> None:
    """A file of the engine fits a few screens, and a function one. The trainer is the longest: it lists all it has."""
    for file in (TEMPLATE / "common").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 400, file
        assert longest(source) <= 60, file


def sizes(project: Path) -> Counter[str]:
    """Return the files of a project, and the tokens of its tests and of what an owner has to read."""
    found = Counter[str]()
    for file in project.rglob("*"):
        if "__pycache__" in file.parts or not file.is_file():
            continue
        found["files"] += 1
        room = file.relative_to(project).parts[0]
        if file.suffix == ".py" and room != "examples":
            found["tests" if room == "tests" else "own"] += len(code_tokens(file.read_text(encoding="utf-8")))
    return found


def density(text: str) -> Counter[str]:
    """Return how often each of DENSITY occurs."""
    found = Counter[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.IfExp):
            found["conditional expressions"] += 1
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            found["comprehensions"] += 1
        elif isinstance(node, ast.NamedExpr):
            found["walrus"] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found["tuple assignments"] += isinstance(node.targets[0], ast.Tuple)
    lines = Counter(token.start[0] for token in tokens_of(text) if token.start[0] == token.end[0])
    found["lines above 22 tokens"] = sum(count > 22 for count in lines.values())
    return found


def longest(source: str) -> int:
    """Return the lines of the longest function."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return max(((node.end_lineno or 0) - node.lineno + 1 for node in nodes), default=0)


def source_lines(text: str) -> int:
    """Return how many lines hold code."""
    lines: set[int] = set()
    for token in code_tokens(text):
        lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def code_tokens(text: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of code: no comments, docstrings and line ends."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return [token for token in tokens_of(text) if token.start[0] not in documented]


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    """Return all tokens but comments and line ends."""
    return [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in BLANK]
