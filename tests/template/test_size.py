"""How large the project may be: rooms, files, functions. Not tested in rendered projects, whose owners may grow."""

import ast
import io
import tokenize
from collections import Counter

from support import TEMPLATE

# Source lines: without blank lines, comments and docstrings. To raise one is a decision: write the reason into
# docs/design.md, and ask first what the new lines could replace.
ENGINE = {
    "base": 182,
    "config": 1124,
    "distributed": 759,
    "progress": 174,
    "failure": 413,
    "run": 404,
    "data": 1329,
    "optim": 910,
    "checkpoint": 1089,
    "monitor": 932,
    "model": 521,
    "evaluation": 447,
    "ops": 254,
    "task": 118,
    "stage": 29,
    "stages": 140,
    "settings": 132,
    "evaluator": 138,
    "step": 210,
    "fixed_step": 87,
    "build": 174,
    "run_context": 151,
    "trainer": 271,
}
ROOMS = {
    "common": 10022,
    "custom": 330,
    "library": 851,
    "cli": 1057,
    "tools": 3870,
    "programs": 173,
    "examples": 1516,
    "tests": 7000,
}
OWNED = 16_289  # all but examples and tests
YOURS = 500, 10  # custom/ without operators: source lines, files


def test_every_room_keeps_to_its_budget() -> None:
    """A project stays as small as its owner can read."""
    engine, rooms = Counter[str](), Counter[str]()
    for file in TEMPLATE.rglob("*.py"):
        room, *rest = file.relative_to(TEMPLATE).parts
        lines = source_lines(file.read_text(encoding="utf-8"))
        rooms[room if rest else "programs"] += lines
        if room == "common" and rest != ["__init__.py"]:
            engine[rest[0].removesuffix(".py")] += lines
    over = {name: lines for name, lines in engine.items() if lines > ENGINE.get(name, 0)}
    over |= {name: lines for name, lines in rooms.items() if lines > ROOMS[name]}
    assert not over, f"over budget: {over}"
    assert sum(rooms.values()) - rooms["examples"] - rooms["tests"] <= OWNED


def test_your_room_is_yours() -> None:
    """custom/ has samples to edit, each shorter than a screen, and nothing of the engine."""
    files = [file for file in (TEMPLATE / "custom").rglob("*.py") if "ops" not in file.parts]
    sizes = [source_lines(file.read_text(encoding="utf-8")) for file in files]
    lines, number = YOURS
    assert sum(sizes) <= lines
    assert len(files) <= number
    assert max(sizes) <= 60


def test_the_story_is_on_one_screen() -> None:
    """train.py, from the config to the end of training, and the loop are functions that fit a screen."""
    source = (TEMPLATE / "train.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 70
    assert longest(source) <= 45


def test_files_and_functions_are_short() -> None:
    """A file of the engine fits a few screens, and a function one."""
    for file in (TEMPLATE / "common").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 312, file
        assert longest(source) <= 45, file


def longest(source: str) -> int:
    """Lines of the longest function."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return max(((node.end_lineno or 0) - node.lineno + 1 for node in nodes), default=0)


def source_lines(text: str) -> int:
    """Lines that hold code."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)
