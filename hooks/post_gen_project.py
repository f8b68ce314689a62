"""Removes the files that were not chosen, renames the user's package, records the answers, prints the next commands.

Rendered and run by cookiecutter in the new project, or by `with_copier.py`. Safe to run again: the update tools do so
in temporary folders, `cookiecutter -f` and `copier update` in a folder that is in use. No prompt, no network, no git.
"""

import filecmp
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

# Raw and triple-quoted, so that no answer can end the string: JSON never holds three quotes in a row.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

RECORD = """\
# Where this project comes from, written by the template and by `copier update`: see docs/updating.md. Not to be edited.
"""

# What tools leave behind when the template folder itself is linted and tested.
CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
# Never ours to touch when a project is rendered over one that is in use.
PRIVATE = CACHES | {".git", ".venv", "venv", "experiments"}

PROJECT = "{" + "{cookiecutter.proj_name}" + "}"  # in two parts: this file is a template itself
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
    """Removes the files that were not chosen, and the list of the parts' files, leaves.yaml."""
    if answers["license"] == "none":
        (root / "LICENSE").unlink(missing_ok=True)
    if answers["ci"] == "none":
        for name in ("workflows/ci.yml", "dependabot.yml"):
            (root / ".github" / name).unlink(missing_ok=True)
        drop_empty(root / ".github" / "workflows", root / ".github")
    table = root / "leaves.yaml"
    if not table.is_file():  # run again
        return
    leaves = yaml.safe_load(table.read_text(encoding="utf-8"))
    for name in unwanted_leaves(answers, leaves):
        for path in {path for pattern in leaves[name]["files"] for path in root.glob(pattern) if path.is_file()}:
            path.unlink()
            drop_empty(*(folder for folder in path.parents if root in folder.parents))
    table.unlink()


def unwanted_leaves(answers, leaves):
    """Return the leaves that the answers leave out. Exits with a sentence if `parts` names one that does not exist."""
    optional = [name for name in leaves if name != "examples"]
    sets = {"all": optional, "usual": [name for name in optional if leaves[name].get("usual")], "core": []}
    wanted = set()
    for word in answers["parts"].replace(",", " ").split():
        wanted.update(sets.get(word, [word]))
    if unknown := sorted(wanted - set(optional)):
        choices = " ".join([*sets, *optional])
        sys.exit(f"error: parts: there is no {', '.join(unknown)}; answer with one or more of: {choices}")
    wanted |= {"examples"} if answers["examples"] == "all" else set()
    while missing := {need for name in wanted for need in leaves[name].get("needs", ())} - wanted:
        wanted |= missing
    return [name for name in leaves if name not in wanted]


def drop_empty(*folders):
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def template_folder(answers):
    """Returns the folder that the template lies in, or None."""
    return folder_at(answers.get("_repo_dir"))


def folder_at(address):
    """Returns the folder of a template whose address is a path; None if it is another address.

    It is named as it was given: a relative path starts where the command ran, which nothing names.
    """
    starts = (os.environ.get("PWD", "/"), *Path.cwd().parents)
    folders = (Path(start, address or "/nowhere") for start in starts)
    return next((folder for folder in folders if (folder / PROJECT).is_dir()), None)


def template_files(answers):
    """Returns the folder of the template's files, and their paths in it; twice None if it is not known."""
    if not (folder := template_folder(answers)):
        return None, None
    folder /= PROJECT
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


def record(root, answers):
    """Writes where the project comes from: the template's address and commit, and the answers, in copier's form.

    The version is in common/VERSION. Of an unknown address nothing is written: cruft keeps a file of its own.
    """
    if "_repo_dir" not in answers:
        return
    commit = answers.get("_commit") or commit_of(template_folder(answers))
    source = {"_commit": commit} if commit else {}
    address = answers["_template"]
    folder = folder_at(address)  # `copier update` does not run where a relative path started
    source["_src_path"] = address if folder is None else str(folder.resolve())
    source.update((key, answer) for key, answer in answers.items() if not key.startswith("_"))
    text = RECORD + yaml.safe_dump(source, sort_keys=False, allow_unicode=True, width=1000)
    (root / answers.get("_record", ".copier-answers.yml")).write_bytes(text.encode("utf-8"))


def commit_of(folder):
    """Returns the commit that is checked out in a clone, read without git; None if it is not one."""
    if folder is None:
        return None
    git = folder / ".git"
    try:
        if git.is_file():  # a work tree beside the first
            git = folder / git.read_text().partition(":")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        name = head[len("ref: ") :]
        if (common / name).is_file():
            return (common / name).read_text().strip()
        packed = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None


def print_next_steps(answers):
    if "_repo_dir" not in answers and Path.cwd().is_relative_to(tempfile.gettempdir()):
        return  # cruft renders twice, to compare
    if os.environ.get("COPIER_OPERATION") == "update":
        return
    folder = Path.cwd().name
    print(f"""
{answers["proj_name"]} is ready. Next:

  cd {folder}
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
    record(root, ANSWERS)
    print_next_steps(ANSWERS)


if __name__ == "__main__":
    main()
