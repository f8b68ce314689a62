"""A rendered project takes over a newer version of the template, and keeps what its owner changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import CACHES, REPO, TEMPLATE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="the update tool works on git repositories"),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own: no settings of the user who runs this, and nothing written into theirs."""
    settings = tmp_path / "gitconfig"
    settings.write_text("[user]\nname = A\nemail = a@example.org\n[init]\ndefaultBranch = main\n")
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "GIT_CONFIG_GLOBAL": str(settings),
        "GIT_CONFIG_NOSYSTEM": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def test_update_brings_the_new_and_keeps_the_users_own(tmp_path: Path, environment: dict[str, str]) -> None:
    """D-09: under another name of `custom/`, with edits in files of the template and in files of one's own."""

    def call(folder: Path, *command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def commit(folder: Path, message: str) -> None:
        call(folder, "git", "add", "--all")
        call(folder, "git", "commit", "--quiet", "--message", message)

    source = tmp_path / "template"
    shutil.copytree(TEMPLATE, source / TEMPLATE.name, ignore=shutil.ignore_patterns(*CACHES))
    shutil.copytree(REPO / "hooks", source / "hooks", ignore=shutil.ignore_patterns(*CACHES))
    shutil.copy(REPO / "cookiecutter.json", source)
    call(source, "git", "init", "--quiet")
    commit(source, "old")

    answers = json.dumps({"proj_name": "spin-lab", "custom_name": "spinlab", "ci": "none"})
    cruft = (sys.executable, "-m", "cruft")
    call(tmp_path, *cruft, "create", str(source), "--no-input", "--extra-context", answers)
    project = tmp_path / "spin-lab"
    call(project, "git", "init", "--quiet")
    (project / "spinlab" / "models" / "mine_model.py").write_text("MINE = 1\n")
    append(project / "spinlab" / "__init__.py", "# mine\n")
    append(project / "common" / "base" / "errors.py", "# mine too\n")
    commit(project, "mine")

    (source / TEMPLATE.name / "common" / "new.py").write_text("from custom import task\n")
    append(source / TEMPLATE.name / "common" / "progress.py", "# new in the template\n")
    commit(source, "new")
    call(project, *cruft, "update", "--skip-apply-ask")

    assert (project / "common" / "new.py").read_text() == "from spinlab import task\n"
    assert (project / "common" / "progress.py").read_text().endswith("# new in the template\n")
    assert (project / "spinlab" / "models" / "mine_model.py").read_text() == "MINE = 1\n"
    assert (project / "spinlab" / "__init__.py").read_text().endswith("# mine\n")
    assert (project / "common" / "base" / "errors.py").read_text().endswith("# mine too\n")
    assert not (project / "custom").exists()
    assert list(project.rglob("*.rej")) == []
    changed = call(project, "git", "status", "--porcelain").split("\n")
    assert {line[3:] for line in changed if line} == {".cruft.json", "common/new.py", "common/progress.py"}


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line)
