"""Delete what you do not use: python -m tools.prune [LEAF ...]

Without LEAF, list what can go; `leaves.yaml` says what goes with it. Deleted files can be restored from git only, so it
refuses to run with uncommitted changes; --force overrides this. Needs only PyYAML: it also runs while the project is
rendered.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = "leaves.yaml"
Leaf = Mapping[str, Any]
# Beside README.md and below these folders, marked lines are looked for.
_PAGES = ("docs", "configs", "custom", "examples", "tests")


class CannotPrune(Exception):
    """A leaf cannot be removed, for the reason in the message. Nothing has been changed."""


def read_leaves(root: Path) -> dict[str, Leaf]:
    """Read the table of the leaves that this project still has, by name."""
    file = root / TABLE
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {} if file.is_file() else {}


def files_of(root: Path, leaf: Leaf) -> list[Path]:
    """List the files that belong to this leaf only."""
    return sorted({path for pattern in leaf["files"] for path in root.glob(pattern) if path.is_file()})


def prune(root: Path, names: Iterable[str]) -> list[Path]:
    """Remove leaves: delete their files, and the lines about them in other files. Returns the deleted files.

    Raises:
        CannotPrune: a leaf does not exist, another leaf needs it, or a text to be removed was edited.
    """
    leaves, names = read_leaves(root), list(dict.fromkeys(names))
    for name in names:
        if name not in leaves:
            raise CannotPrune(f"there is no leaf called {name}; choose from: {', '.join(leaves) or 'none left'}")
        users = [other for other, leaf in leaves.items() if name in leaf.get("needs", ()) and other not in names]
        if users:
            raise CannotPrune(
                f"{name} is needed by {', '.join(users)}; to remove all: LEAF='{' '.join([name, *users])}'"
            )
    deleted = [path for name in names for path in files_of(root, leaves[name])]
    texts: dict[Path, str] = {}
    for name in names:
        for file, old, new in _edits(leaves[name]):
            path = root / file
            if path in deleted or not path.is_file():
                continue
            text = texts.get(path) or path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                raise CannotPrune(
                    f"{file} does not have the following text exactly once; it was probably edited. Remove by hand "
                    f"what it does for {name}, delete this edit from {TABLE}, commit, and run the command again:\n{old}"
                )
            texts[path] = text.replace(old, new)
    lines = [line for name in names for line in leaves[name].get("lines", ())]
    pages = [
        *root.glob("*.md"),
        *(path for folder in _PAGES for kind in ("md", "yaml") for path in root.glob(f"{folder}/**/*.{kind}")),
    ]
    for path in (path for path in pages if path.is_file() and path not in deleted):
        texts[path] = _drop_marked(texts.get(path) or path.read_text(encoding="utf-8"), names, lines)
    texts[root / TABLE] = _without_entries((root / TABLE).read_text(encoding="utf-8"), names)
    for path in deleted:
        path.unlink()
    for folder in sorted({parent for path in deleted for parent in path.parents if parent != root}, reverse=True):
        if root in folder.parents and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    for path, text in texts.items():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8", newline="\n")
    for word in (word for name in names for word in leaves[name].get("schema", ())):
        _drop_from_schema(root / "configs" / "schema.json", word)
    return deleted


def _edits(leaf: Leaf) -> Iterable[tuple[str, str, str]]:
    """Yield the edits of files that stay: file, text, and its replacement."""
    for file, edits in leaf.get("edits", {}).items():
        for edit in edits:
            old, new = (edit, "") if isinstance(edit, str) else edit
            yield file, old, new


def _drop_marked(text: str, names: Sequence[str], lines: Sequence[str]) -> str:
    """Drop lines marked `<!-- leaf: name -->`, and lines that match one of `lines` completely.

    A mark on a line of its own begins a block that ends with `<!-- end -->`.
    """
    any_of = "|".join(map(re.escape, names))
    text = re.sub(rf"^<!-- leaf: ({any_of}) -->\n.*?^<!-- end -->\n", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in (rf".*<!-- leaf: ({any_of}) -->", *lines):
        text = re.sub(rf"^{line}\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\n+\Z", "\n", text)  # a page may end with a block


def _without_entries(table: str, names: Sequence[str]) -> str:
    for name in names:
        table = re.sub(rf"^{re.escape(name)}:\n(?:[ #].*\n|\n(?=\n*[ #]))*\n?", "", table, flags=re.MULTILINE)
    return table.rstrip("\n") + "\n"


def _drop_from_schema(path: Path, name: str) -> None:
    """Remove a registered name from the schema for editors, with the rule for its arguments."""
    rule = {"properties": {"type": {"const": name}}}

    def about_it(item: Any) -> bool:
        return item == name or (isinstance(item, dict) and item.get("if") == rule)

    def without(node: dict[str, Any]) -> dict[str, Any]:
        lists = {key: value for key, value in node.items() if isinstance(value, list)}
        return node | {key: [item for item in value if not about_it(item)] for key, value in lists.items()}

    if path.is_file():
        schema = json.loads(path.read_text(), object_hook=without)
        path.write_text(json.dumps(schema, indent=2) + "\n", newline="\n")


def main(words: Sequence[str]) -> int:
    """List the leaves, or remove some. Returns the exit code."""
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    names = [word for word in words if word != "--force"]
    leaves = read_leaves(ROOT)
    if not names:
        for name, leaf in leaves.items():
            print(f"{name:<12} {leaf['about']} ({len(files_of(ROOT, leaf))} files)")
        print("\nTo remove some: make prune LEAF=NAME, or LEAF='NAME NAME'")
        return 0
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if (status.returncode or status.stdout) and "--force" not in words:
        why = "there are uncommitted changes" if status.returncode == 0 else "this folder is not in git"
        print(f"error: {why}, so deletions are final; commit, or make prune LEAF='... --force'", file=sys.stderr)
        return 1
    try:
        deleted = prune(ROOT, names)
    except CannotPrune as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in deleted:
        print(f"deleted {path.relative_to(ROOT)}")
    print(f"\nRemoved {', '.join(names)}. `git diff` shows what changed; `make lint test` checks the project.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
