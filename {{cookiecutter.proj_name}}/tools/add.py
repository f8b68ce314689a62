"""Add a part of the template to this project: python -m tools.add [PART ...]

Without PART, list what can be added. A part comes with its tests and its page, from the commit of the template that
this project was made from or last updated to. Your edits are kept. Needs git, and no uncommitted changes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SHORT = [  # of cookiecutter and copier
    "-c",
    "url.https://github.com/.insteadOf=gh:",
    "-c",
    "url.https://gitlab.com/.insteadOf=gl:",
    "-c",
    "url.https://bitbucket.org/.insteadOf=bb:",
]


def source(root: Path) -> tuple[str, str | None]:
    """Return the address of the template that a project comes from, and its commit if there was one."""
    for name, address, commit in (
        (".copier-answers.yml", "_src_path", "_commit"),
        (".cruft.json", "template", "commit"),  # YAML reads JSON too
    ):
        if (root / name).is_file():
            record = yaml.safe_load((root / name).read_text(encoding="utf-8"))
            return record[address], record.get(commit)
    sys.exit("error: no .copier-answers.yml names this project's template: copy the files from there by hand")


def template_at(root: Path, folder: Path, address: str, commit: str | None) -> Path:
    """Return a folder with the template as it was at a commit; `folder` is where to clone it."""
    local = root.parent / address  # a relative path starts where the project was made
    if local.is_dir():
        if commit is None:
            return local
        address = str(local)
    cloned = git(root, *SHORT, "clone", "--quiet", "--no-checkout", address, str(folder))
    if cloned.returncode:
        sys.exit(
            f"error: the template cannot be reached at {address}:\n{cloned.stderr.strip()}\n"
            "If it is elsewhere now, write its address into .copier-answers.yml or .cruft.json, and try again."
        )
    if git(folder, "checkout", "--quiet", commit or "HEAD").returncode:
        sys.exit(
            f"error: the template at {address} no longer has the commit {commit} that this project comes from.\n"
            "Update to one that it has, and try again: see docs/updating.md."
        )
    return folder


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git without a question to the user."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    return subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    if "--help" in sys.argv or "-h" in sys.argv:
        print(__doc__)
        sys.exit()
    address, commit = source(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        template = template_at(ROOT, Path(temporary, "template"), address, commit)
        adding = [sys.executable, str(template / "hooks" / "add.py"), str(ROOT), address, *sys.argv[1:]]
        sys.exit(subprocess.run(adding, check=False).returncode)
