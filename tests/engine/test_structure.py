"""The walls of the house: what may import what, and that the way through it can be read at one go."""

import ast
import re
from pathlib import Path

from tests.conftest import PROJECT
import custom

# The house, from the ground up: a room imports only from the rows before its own. A module outside of all rooms is one.
FLOORS = (
    {"base"},
    {"config"},
    {"distributed", "progress", "ops"},
    {"failure", "run", "data", "optim"},
    {"checkpoint", "model", "monitor"},
    {"evaluation"},
    {"task", "stage", "settings", "evaluator", "finite", "step", "build", "run_context", "trainer"},
)
# The top floor is the story: modules in this order, each may import those before it.
STORY = ("task", "stage", "settings", "evaluator", "finite", "step", "build", "run_context", "trainer")
# Rooms that can be deleted with what is built on them: nothing else in the engine knows of them.
LEAVES = {"ops"}
YOURS = {"train", "evaluate", "predict", "library", "parts", "cli", "tools", "tests"}
YOURS.add(Path(custom.__path__[0]).name)


def test_the_engine_does_not_know_your_code() -> None:
    """Nothing in common imports the project's own package, its entry points or its tests."""
    found = imports()
    assert len(found) > 20
    wrong = {name: [use for use in uses if use.split(".")[0] in YOURS] for name, uses in found.items()}
    assert not any(wrong.values()), wrong


def test_nothing_imports_the_ready_made_parts() -> None:
    """So each file of library/ can be deleted; its own files, tools and tests may use each other."""
    users = [
        file.relative_to(PROJECT).as_posix()
        for package in ("common", "cli", Path(custom.__path__[0]).name)
        for file in (PROJECT / package).rglob("*.py")
        if re.search(r"^\s*(from|import) library\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert users == []


def test_your_code_needs_only_the_engine() -> None:
    package = Path(custom.__path__[0])
    users = [
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(r"^\s*(from|import) (cli|library|tools)\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert users == []


def test_rooms_import_only_from_the_floors_below() -> None:
    """So the engine can be read from the ground up, and a stranger knows what a room may need."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = imports()
    assert {room(name) for name in found} - {""} <= floor.keys()
    for name, uses in found.items():
        for use in uses:
            if within(use, "common") and room(use) not in ("", room(name)):
                if room(name) in STORY and room(use) in STORY:
                    assert STORY.index(room(use)) < STORY.index(room(name)), f"{name} imports {use}"
                else:
                    assert floor[room(use)] < floor[room(name)], f"{name} imports {use}"
                assert room(use) not in LEAVES, f"{name} imports {use}"


def test_the_picture_shows_these_floors() -> None:
    """docs/architecture.md: floor by floor, from the top; a floor that needs two lines continues with a dot."""
    text = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│ ")]
    rows = "\n".join(cells).replace("\n·", " ·").splitlines()
    assert [set(row.split(" · ")) for row in rows] == list(reversed(FLOORS))


def test_the_guide_names_files_that_exist() -> None:
    """docs/architecture.md: each path of its table."""
    text = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [name for line in text.splitlines() if line.startswith("| …") for name in line.split("`")[1::2]]
    paths = [PROJECT / name for name in named if "/" in name and " " not in name]
    assert len(paths) > 10
    assert [path for path in paths if not path.exists()] == []


def test_every_room_says_what_it_is_for() -> None:
    rooms = [path for path in (PROJECT / "common").iterdir() if path.is_dir() and any(path.glob("*.py"))]
    silent = [path.name for path in rooms if not ast.get_docstring(ast.parse((path / "__init__.py").read_text()))]
    loose = [path.name for path in (PROJECT / "common").glob("*.py") if path.name != "__init__.py"]
    assert silent == []
    assert len(rooms) <= 14
    assert len(loose) <= 11


def test_no_module_needs_itself() -> None:
    """The engine can be read from the ground up, since no import leads back to where it started."""
    found = imports(types=False)
    open_: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in open_, " -> ".join([*open_[open_.index(name) :], name])
        if name not in done:
            open_.append(name)
            for use in found[name]:
                if use in found and use != name:
                    visit(use)
            done.add(open_.pop())

    for name in found:
        visit(name)


def room(name: str) -> str:
    """Return the room that a module of the engine is in; "" for what is not of the engine, and for `common` itself."""
    return name.split(".")[1] if within(name, "common") and "." in name else ""


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def imports(*, types: bool = True) -> dict[str, set[str]]:
    """Return each module of common with the modules it imports, inside functions too; with `types`, for types too."""
    files = {dotted(file): file for file in (PROJECT / "common").rglob("*.py")}
    found = {}
    for name, file in files.items():
        tree = ast.parse(file.read_text())
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        uses: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and (types or node not in for_types):
                uses |= named(node, files)
        found[name] = uses
    return found


def named(node: ast.Import | ast.ImportFrom, files: dict[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    assert node.level == 0, "relative imports are not used here"
    module = node.module or ""
    # `from common import distributed` means the module; `from common.distributed import Rank` one that has the name.
    return {below if (below := f"{module}.{alias.name}") in files else module for alias in node.names}


def dotted(file: Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
