"""The walls of the house: what may import what, and that the way through it can be read at one go."""

import ast
import inspect
from pathlib import Path

import train
from tests.conftest import PROJECT
import custom

# Module or package of the engine -> all that it may import of ours, its own parts aside.
FLOOR = {
    "common.errors": set(),
    "common.config": {"common.errors"},
    "common.registry": {"common.config", "common.errors"},
    "common.distributed": {"common.config", "common.errors"},
}
YOURS = {Path(custom.__path__[0]).name, "train", "evaluate", "tests"}


def test_train_py_is_one_screen() -> None:
    """CT-01: from the config to the end of training, in one function that fits a screen, in a short file."""
    assert len(inspect.getsource(train.main).splitlines()) <= 45
    assert len(inspect.getsource(train.train).splitlines()) <= 45
    assert len(inspect.getsource(train).splitlines()) <= 140


def test_the_engine_does_not_know_your_code() -> None:
    """R-11: nothing in common imports the project's own package, its entry points or its tests."""
    found = imports()
    assert len(found) > 20
    wrong = {name: [use for use in uses if use.split(".")[0] in YOURS] for name, uses in found.items()}
    assert not any(wrong.values()), wrong


def test_the_ground_floor_stands_by_itself() -> None:
    """R-11: config, registry and dist import nothing of ours but what lies below them."""
    found = imports()
    for part, allowed in FLOOR.items():
        inside = {name: uses for name, uses in found.items() if within(name, part)}
        assert inside, f"{part} has moved; this test must follow"
        for name, uses in inside.items():
            ours = {use for use in uses if within(use, "common") and not within(use, part)}
            assert all(any(within(use, below) for below in allowed) for use in ours), f"{name} imports {ours}"


def test_no_module_needs_itself() -> None:
    """R-11: the engine can be read from the ground up, since no import leads back to where it started."""
    found = imports()
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


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def imports() -> dict[str, set[str]]:
    """Every module of common, and the modules it imports when it runs, inside functions too; not for types alone."""
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
            if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in for_types:
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
