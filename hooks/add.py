"""Adds parts to a project, or lists what can be added: run by the project's `tools/add.py`, from its template's commit.

    python hooks/add.py PROJECT ADDRESS [PART ...]

A part comes with its tests, its page, and the parts it needs. The owner's files are kept.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

TEMPLATE = Path(__file__).resolve().parent.parent
CRUFT = ".cruft.json"
RECORD = ".copier-answers.yml"


def main(project, address, *names):
    root = Path(project)
    answers = answers_of(root)
    table = parts_of(answers["custom_name"])
    here = parts_in(root, table)
    refuse(root, table, here, names)
    if not names:
        return
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary, "new")
        render(new, asking_for(answers, [*here, *names]), address)
        for name in parts_in(new, table):
            if name not in here:
                take(root, new, files_of(new, table[name]))
    record(root, answers, table, names)
    print(f"\nAdded {', '.join(names)}. `git status` shows what changed; `make lint test` checks the project.")


def answers_of(root):
    """Returns the answers that the project was made with, by question."""
    if (root / RECORD).is_file():
        answers = yaml.safe_load((root / RECORD).read_text(encoding="utf-8"))
    else:
        answers = json.loads((root / CRUFT).read_text(encoding="utf-8"))["context"]["cookiecutter"]
    return {key: value for key, value in answers.items() if not key.startswith("_")}


def files_of_project():
    """Returns the folder of the template that becomes a project; its name is a placeholder."""
    return next(TEMPLATE.glob("{{*}}"))


def parts_of(package):
    """Returns the parts of the template; the project's own package may have another name than the template's."""
    table = yaml.safe_load((files_of_project() / "leaves.yaml").read_text(encoding="utf-8"))
    theirs = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))["custom_name"]
    for part in table.values():
        part["files"] = [re.sub(f"^{theirs}/", f"{package}/", pattern) for pattern in part["files"]]
    return table


def files_of(root, part):
    return sorted({path for pattern in part["files"] for path in root.glob(pattern) if path.is_file()})


def parts_in(root, table):
    """Lists the parts of which the project has files."""
    return [name for name, part in table.items() if files_of(root, part)]


def refuse(root, table, here, names):
    """Exits with a sentence where a part cannot be added; without names, prints those that can."""
    absent = [f"  {name:<12} {part['about']}" for name, part in table.items() if name not in here]
    listed = "\n".join(absent) or "  nothing: all parts are here"
    if not names:
        print(f"These can be added, with make add PART=NAME:\n{listed}")
        return
    for name in names:
        if name in here:
            sys.exit(f"error: {name} is here already: {table[name]['about']}")
        if name not in table:
            sys.exit(f"error: there is no part called {name}. These can be added:\n{listed}")
    status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, check=False)
    if status.returncode or status.stdout:
        why, first = "there are uncommitted changes", ""
        if status.returncode:
            why, first = "this folder is not in git", "git init && "
        sys.exit(f"error: {why}, so an addition could not be undone; commit first: {first}git add -A && git commit")


def asking_for(answers, parts):
    """Returns the answers that ask for exactly these parts."""
    names = [name for name in parts if name != "examples"]
    return {**answers, "parts": " ".join(names) or "core", "examples": "all" if "examples" in parts else "none"}


def render(folder, answers, address):
    """Makes the project of some answers in a new folder."""
    shutil.copytree(files_of_project(), folder)
    given = json.dumps({**answers, "_src_path": address})
    environment = {**os.environ, "COPIER_OPERATION": "update", "PYTHONDONTWRITEBYTECODE": "1"}
    hook = [sys.executable, str(TEMPLATE / "hooks" / "with_copier.py"), given, "", RECORD]
    done = subprocess.run(hook, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: the template could not be rendered:\n{done.stdout}{done.stderr}".strip())


def take(root, new, files):
    """Copies files of a new project to the owner's, except those that are there."""
    for file in files:
        mine = root / file.relative_to(new)
        if mine.exists():
            print(f"kept {mine.relative_to(root)}, though the part has a file of that name")
            continue
        mine.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, mine)
        print(f"added {mine.relative_to(root)}")


def record(root, answers, table, names):
    """Writes that the project now has these parts, too, so that updates keep them."""
    asked = answers["parts"].replace(",", " ").split()
    for name in names:
        known = name in asked or "all" in asked or ("usual" in asked and table[name].get("usual"))
        if not known and name != "examples":
            asked.append(name)
    parts = " ".join(asked)
    for file in (root / RECORD, root / CRUFT):
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        text = re.sub(r'^( *"?parts"?: ?"?)[^"\n]*', rf"\g<1>{parts}", text, count=1, flags=re.MULTILINE)
        if "examples" in names:
            text = re.sub(r'^( *"?examples"?: ?"?)none', r"\g<1>all", text, count=1, flags=re.MULTILINE)
        file.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
