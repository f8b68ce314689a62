"""Removes the files that were not chosen, renames the user's package, and prints the next commands.

Rendered and run by cookiecutter in the new project. Safe to run again: the update tool does so in a temporary folder,
and `cookiecutter -f` in a folder that is in use. No prompt, no network, no git.
"""

import filecmp
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

# Raw and triple-quoted, so that no answer can end the string: JSON never holds three quotes in a row.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

# What tools leave behind when the template folder itself is linted and tested.
CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
# Never ours to touch when a project is rendered over one that is in use.
PRIVATE = CACHES | {".git", ".venv", "venv", "experiments"}

SHIPPED_DATA = {"data/README.md", "data/digits.npz"}

TEXT_SUFFIXES = {"", ".cfg", ".ini", ".ipynb", ".json", ".md", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}
TEXT_SUFFIXES |= {".py", ".cpp", ".cu", ".cuh", ".h"}

# The places where "custom" is the package and not an English word. Each leaves customise, custom_name, my_custom,
# and "a custom loss" alone.
CUSTOM = re.compile(
    r"""
      (?<![\w./-])  custom (?= \.[A-Za-z_*] )          # custom.models: an import, a type in a config
    | (?<![\w-])    custom (?= / )                     # custom/models: a path
    | (?<= ["'`])   custom (?= (?: \* | \\ )? ["'`] )  # "custom", 'custom', `custom`, "custom*", \"custom\" in JSON
    | (?<= from\ )  custom (?= \ import\b )
    | (?<= import\ ) custom (?= [ \t]* (?: $ | [,;\#] | as\b ) )
    """,
    re.VERBOSE | re.MULTILINE,
)


def drop_unwanted(root, answers):
    """Removes the files that were not chosen; of leaves also what other files say of them, see leaves.yaml."""
    if answers["license"] == "none":
        (root / "LICENSE").unlink(missing_ok=True)
    if answers["ci"] == "none":
        (root / ".github" / "workflows" / "ci.yml").unlink(missing_ok=True)
        drop_empty(root / ".github" / "workflows", root / ".github")
    prune = load(root / "tools" / "prune.py")
    prune.prune(root, unwanted_leaves(answers, prune.read_leaves(root)))


def load(path):
    """Load a module of the new project that needs nothing but Python and PyYAML."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unwanted_leaves(answers, leaves):
    """Return the leaves that the answers leave out. Exits with a sentence if `parts` names one that does not exist."""
    parts = answers.get("parts", "all").replace(",", " ").split()
    optional = [name for name in leaves if name not in ("ops", "examples")]
    wanted = set(optional) if parts == ["all"] else set() if parts == ["core"] else set(parts)
    if unknown := sorted(wanted - set(optional)):
        sys.exit(f"error: parts: there is no {', '.join(unknown)}; answer all, core, or some of: {' '.join(optional)}")
    wanted |= {"ops"} if answers["ops"] == "yes" else set()
    wanted |= {"examples"} if answers["examples"] == "all" else set()
    while missing := {need for name in wanted for need in leaves[name].get("needs", ())} - wanted:
        wanted |= missing
    return [name for name in leaves if name not in wanted]


def drop_empty(*folders):
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def template_files(answers):
    """Returns the template's folder and the paths of its files; twice None if cookiecutter does not say where it is."""
    folder = Path(answers.get("_repo_dir") or "/nowhere", "{" + "{cookiecutter.proj_name}" + "}")
    if not folder.is_dir():
        return None, None
    return folder, {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}


def drop_left_behind(root, answers):
    """Deletes copies of runs and data that training in the template's own folder has left there."""
    folder, paths = template_files(answers)
    for path in sorted(paths or (), reverse=True):
        is_left = path.parts[0] == "experiments" or (path.parts[0] == "data" and path.as_posix() not in SHIPPED_DATA)
        if is_left and (root / path).is_file() and filecmp.cmp(root / path, folder / path, shallow=False):
            (root / path).unlink()
            drop_empty(*(root / parent for parent in path.parents[:-1]))


def drop_caches(root):
    for folder, names, _ in os.walk(root):
        for name in CACHES & set(names):
            shutil.rmtree(Path(folder, name))
        names[:] = [name for name in names if name not in PRIVATE]


def rename_custom(root, answers):
    """Renames the folder `custom`, and in the template's files every mention of it as a package or a path."""
    name = answers["custom_name"]
    if name == "custom":
        return
    _, rendered = template_files(answers)
    move_into(root / "custom", root / name)
    for folder, names, files in os.walk(root):
        names[:] = [each for each in names if each not in PRIVATE]
        for file in files:
            path = Path(folder, file)
            if rendered is None or original(path.relative_to(root), name) in rendered:
                rewrite(path, name, answers)


def original(path, name):
    """Returns the path that a file has in the template."""
    return Path("custom", *path.parts[1:]) if path.parts[0] == name else path


def move_into(source, target):
    """Like a rename, but also onto a folder that exists: then file by file, the new one winning."""
    if not source.is_dir():
        return
    for path in sorted(source.rglob("*")):
        if path.is_file():
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            path.replace(destination)
    shutil.rmtree(source)


def rewrite(path, name, answers):
    """Bytes in, bytes out: line endings, lines with answers, and everything else stay as they are."""
    if path.suffix not in TEXT_SUFFIXES or path.is_symlink():
        return
    try:
        old = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return  # not a text, so it names no package
    if path.name == "LICENSE":
        return
    new = "".join(
        line if is_answer(line, answers) else CUSTOM.sub(name, line) for line in old.splitlines(keepends=True)
    )
    if new != old:
        path.write_bytes(new.encode("utf-8"))


def is_answer(line, answers):
    """Whether a line of README.md or pyproject.toml holds an answer, which may name the package by chance."""
    texts = (answers.get("description"), answers["proj_name"])
    return line.startswith(("name = ", "authors = ", "description = ")) or line.strip("#> \n") in texts


def print_next_steps(answers):
    if "_commit" in answers and Path.cwd().is_relative_to(tempfile.gettempdir()):
        return  # the update tool renders twice, to compare
    print(f"""
{answers["proj_name"]} is ready. Next:

  cd {answers["proj_name"]}
  python -m pip install -r requirements.txt
  python train.py --config configs/default.yaml
  python evaluate.py --model_pt experiments/default/checkpoints/best.pt

With git, each run records its commit, and pre-commit can check your changes:

  git init && git add -A && git commit -m "Start"
""")


def main():
    root = Path.cwd()
    drop_unwanted(root, ANSWERS)
    drop_caches(root)
    drop_left_behind(root, ANSWERS)
    rename_custom(root, ANSWERS)
    print_next_steps(ANSWERS)


if __name__ == "__main__":
    main()
