"""Add a part of the template to this project: python -m tools.add [PART ...]

Without PART, list what can be added. A part comes with its tests and its page, from the commit of the template that
this project was made from or last updated to. Your edits are kept. Needs git, and no uncommitted changes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RECORDS = (".copier-answers.yml", ".cruft.json")
HOSTS = {"gh": "https://github.com/", "gl": "https://gitlab.com/", "bb": "https://bitbucket.org/"}


class CannotAdd(Exception):
    """A part cannot be added, for the reason in the message. Nothing has been changed."""


def recorded(root: Path) -> tuple[str, str | None, dict[str, str]]:
    """Return where a project comes from: address, commit if there was one, and answers."""
    for name in RECORDS:
        file = root / name
        if not file.is_file():
            continue
        source = yaml.safe_load(file.read_text(encoding="utf-8"))
        if name == ".cruft.json":
            answers = source["context"]["cookiecutter"]
            address, commit = source["template"], source["commit"]
        else:
            answers = source
            address, commit = source["_src_path"], source.get("_commit")
        return address, commit, {key: value for key, value in answers.items() if not key.startswith("_")}
    raise CannotAdd(f"this project has no {RECORDS[0]}, which names its template: copy the files from there by hand")


def template_at(root: Path, folder: Path, address: str, commit: str | None) -> Path:
    """Return a folder with the template as it was at a commit; `folder` is where to clone it."""
    for start in (root, root.parent):
        local = start / address
        if local.is_dir():
            if commit is None:
                return local
            address = str(local)
            break
    host, _, path = address.partition(":")
    if host in HOSTS:
        address = HOSTS[host] + path
    cloned = git(root, "clone", "--quiet", "--no-checkout", address, str(folder))
    if cloned.returncode:
        raise CannotAdd(
            f"the template cannot be reached at {address}:\n{cloned.stderr.strip()}\n"
            f"If it is elsewhere now, write its address into {' or '.join(RECORDS)}, and try again."
        )
    if git(folder, "checkout", "--quiet", commit or "HEAD").returncode:
        raise CannotAdd(
            f"the template at {address} no longer has the commit {commit} that this project comes from.\n"
            f"Update to one that it has, and try again: see docs/updating.md."
        )
    return folder


def project_in(template: Path) -> Path:
    """Return the folder of the template that becomes a project; its name is a placeholder."""
    return next(template.glob("{{*}}"))


def render(template: Path, folder: Path, answers: Mapping[str, str], address: str) -> None:
    """Make the project of some answers in a new folder, by the template's own hooks."""
    shutil.copytree(project_in(template), folder)
    hook = [sys.executable, str(template / "hooks" / "with_copier.py")]
    given = json.dumps({**answers, "_src_path": address})
    environment = {**os.environ, "COPIER_OPERATION": "update", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*hook, given, "", RECORDS[0]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotAdd(f"the template could not be rendered:\n{done.stdout}{done.stderr}".strip())


def parts_of(template: Path, package: str) -> dict[str, Any]:
    """Return the parts of the template; the project's own package may have another name than the template's."""
    table: dict[str, Any] = yaml.safe_load((project_in(template) / "leaves.yaml").read_text(encoding="utf-8"))
    theirs = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))["custom_name"]
    for part in table.values():
        part["files"] = [re.sub(f"^{theirs}/", f"{package}/", pattern) for pattern in part["files"]]
    return table


def files_of(root: Path, part: Mapping[str, Any]) -> list[Path]:
    """List the files of a part."""
    return sorted({path for pattern in part["files"] for path in root.glob(pattern) if path.is_file()})


def parts_here(root: Path, table: Mapping[str, Any]) -> list[str]:
    """List the parts of which the project has files."""
    return [name for name, part in table.items() if files_of(root, part)]


def answered(answers: Mapping[str, str], parts: Sequence[str]) -> dict[str, str]:
    """Return the answers that ask for exactly these parts."""
    names = [name for name in parts if name != "examples"]
    return {**answers, "parts": " ".join(names) or "core", "examples": "all" if "examples" in parts else "none"}


def record(root: Path, answers: Mapping[str, str], names: Sequence[str]) -> None:
    """Write that the project now has these parts, too, so that updates keep them."""
    asked = answers["parts"].replace(",", " ").split()
    parts = " ".join([*asked, *(name for name in names if name != "examples" and name not in asked)])
    for name in RECORDS:
        file = root / name
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        text = re.sub(r'^( *"?parts"?: ?"?)[^"\n]*', rf"\g<1>{parts}", text, count=1, flags=re.MULTILINE)
        if "examples" in names:
            text = re.sub(r'^( *"?examples"?: ?"?)none', r"\g<1>all", text, count=1, flags=re.MULTILINE)
        file.write_text(text, encoding="utf-8", newline="\n")


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git without a question to the user."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    return subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def add(root: Path, names: Sequence[str]) -> int:
    """Add parts to a project, or list what can be added. Returns the exit code."""
    status = git(root, "status", "--porcelain")
    if names and (status.returncode or status.stdout):
        why = "there are uncommitted changes" if status.returncode == 0 else "this folder is not in git"
        raise CannotAdd(f"{why}, so an addition could not be undone; commit first: git add -A && git commit")
    address, commit, answers = recorded(root)
    with tempfile.TemporaryDirectory() as temporary:
        template = template_at(root, Path(temporary, "template"), address, commit)
        table = parts_of(template, answers["custom_name"])
        here = parts_here(root, table)
        absent = {name: part["about"] for name, part in table.items() if name not in here}
        listed = "\n".join(f"  {name:<12} {about}" for name, about in absent.items()) or "  nothing: all parts are here"
        if not names:
            print(f"These can be added, with make add PART=NAME:\n{listed}")
            return 0
        for name in names:
            if name in here:
                raise CannotAdd(f"{name} is here already: {table[name]['about']}")
            if name not in absent:
                raise CannotAdd(f"there is no part called {name}. These can be added:\n{listed}")
        new = Path(temporary, "new")
        render(template, new, answered(answers, [*here, *names]), address)
        for name in parts_here(new, table):
            for file in [] if name in here else files_of(new, table[name]):
                mine = root / file.relative_to(new)
                if mine.exists():
                    print(f"kept {mine.relative_to(root)}, though the part has a file of that name")
                    continue
                mine.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, mine)
                print(f"added {mine.relative_to(root)}")
    record(root, answers, names)
    print(f"\nAdded {', '.join(names)}. `git status` shows what changed; `make lint test` checks the project.")
    return 0


def main(words: Sequence[str]) -> int:
    """Add parts, or say why not. Returns the exit code."""
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    try:
        return add(ROOT, words)
    except CannotAdd as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
