"""`make release`: what it refuses, all at once and before it writes anything, and what it leaves behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import CACHES, REPO, TEMPLATE, copy_of_template

READY = """# Changelog

## 0.2.0

2026-11-30

- A better loss.

### If you rendered an earlier version
- Rename `a` to `b` in your configs.

## 0.1.0

2026-11-01

Not in the notes.
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository that is ready for 0.2.0, with one release before it."""
    folder = copy_of_template(tmp_path / "clone")
    shutil.copytree(REPO / "tools", folder / "tools", ignore=shutil.ignore_patterns(*CACHES))
    shutil.copy(REPO / ".gitignore", folder)
    (folder / "README.md").write_text("cookiecutter --checkout v0.2.0 ADDRESS\n")
    (folder / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (folder / "CHANGELOG.md").write_text(READY)
    (folder / TEMPLATE.name / "common" / "VERSION").write_text("0.2.0\n")
    replace(folder / "cookiecutter.json", r'"_template_version": ".*"', '"_template_version": "0.2.0"')
    git(folder, "init", "--quiet", "--initial-branch", "trunk")
    git(folder, "config", "user.name", "A")
    git(folder, "config", "user.email", "a@example.org")
    commit(folder)
    git(folder, "tag", "v0.1.0")
    return folder


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "ready")


def replace(path: Path, pattern: str, new: str) -> None:
    text, number = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
    assert number == 1
    path.write_text(text)


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "tools/release.py", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def refused(folder: Path, version: str = "0.2.0") -> list[str]:
    """Return the reasons; nothing was written."""
    before = git(folder, "status", "--porcelain"), git(folder, "rev-parse", "HEAD"), git(folder, "tag")
    done = release(folder, version, "--checked")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert before == (git(folder, "status", "--porcelain"), git(folder, "rev-parse", "HEAD"), git(folder, "tag"))
    first, *reasons = done.stderr.splitlines()
    assert first == f"{version} cannot be released:"
    return [reason.strip() for reason in reasons]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "pattern", "new", "reason"),
    [
        ("cookiecutter.json", '"_template_version": "0.2.0"', '"_template_version": "0.1.0"', "says 0.1.0"),
        (f"{TEMPLATE.name}/common/VERSION", "0.2.0", "0.2.1", "says 0.2.1"),
        ("CITATION.cff", "^version: .*", 'version: "0.1.0"', "says 0.1.0"),
        ("README.md", "v0.2.0", "v0.1.0", "says 0.1.0"),
        (
            "copier.yml",
            r"^_migrations: \[\]",
            "_migrations:\n  - version: v0.3.0\n    command: x",
            "a migration to 0.3.0",
        ),
        ("CHANGELOG.md", "^2026-11-30$", "Not released yet.", "below ## 0.2.0 must be the date"),
        ("CHANGELOG.md", "^- Rename .*", "", "does not say what an owner has to do"),
    ],
    ids=["cookiecutter", "VERSION", "citation", "readme", "migration", "date", "to do"],
)
def test_what_disagrees_or_is_missing(clone: Path, file: str, pattern: str, new: str, reason: str) -> None:
    replace(clone / file, pattern, new)
    commit(clone)
    (said,) = refused(clone)
    assert said.startswith(file)
    assert reason in said


def test_everything_is_named_at_once(clone: Path) -> None:
    """Uncommitted files, a version that was released, a section that is not there, and every number."""
    (clone / "notes.txt").write_text("mine")
    reasons = refused(clone, "0.1.0")
    assert reasons[0] == "1 files are not committed: notes.txt"
    assert "the last release is v0.1.0" in reasons[1]
    assert {reason.split()[0] for reason in reasons[2:]} >= {"cookiecutter.json", "CHANGELOG.md", "CITATION.cff"}
    (clone / "notes.txt").unlink()
    assert "CHANGELOG.md has no section ## 0.3.0" in refused(clone, "0.3.0")


@pytest.mark.parametrize("words", [[], ["0.2"], ["v0.2.0"], [""]])
def test_a_version_is_three_numbers(clone: Path, words: list[str]) -> None:
    done = release(clone, *words)
    assert done.returncode == 1
    assert "0.2.0" in done.stderr


def test_a_failed_test_stops_it(clone: Path) -> None:
    """Without --checked it runs the full tier itself."""
    (clone / "Makefile").write_text("test-full:\n\t@echo the full tier; exit 1\n")
    commit(clone)
    done = release(clone, "0.2.0")
    assert done.returncode == 1
    assert "the full tier" in done.stdout
    assert done.stderr.splitlines()[-1] == "0.2.0 cannot be released: a test failed"
    assert git(clone, "tag") == "v0.1.0"


@pytest.mark.slow
def test_a_release(clone: Path) -> None:
    """A run and the template are kept in a commit, which is tagged with the notes; what to push is said, not done."""
    (clone / "Makefile").write_text("test-full:\n\t@echo the full tier\n")
    commit(clone)
    remote = clone.parent / "remote"
    git(clone.parent, "clone", "--quiet", "--bare", str(clone), str(remote))
    git(clone, "remote", "add", "origin", str(remote))
    before = git(clone, "rev-parse", "HEAD")
    done = release(clone, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "the full tier"
    assert done.stdout.splitlines()[-1].endswith("git push origin trunk v0.2.0")
    assert git(clone, "cat-file", "-t", "v0.2.0") == "tag"
    assert git(clone, "rev-parse", "v0.2.0^{commit}^") == before
    assert git(clone, "status", "--porcelain") == ""
    kept = git(clone, "diff", "--name-only", before, "v0.2.0").splitlines()
    assert "tests/template/earlier_templates/v0.2.0.tar.xz" in kept
    assert "tests/template/earlier_runs/v0.2.0/checkpoints/latest.pt" in kept
    assert "tests/template/earlier_runs/v0.2.0/continued.jsonl" in kept
    assert all(path.startswith("tests/template/earlier_") for path in kept)
    notes = (clone / "release-notes.md").read_text()
    assert git(clone, "tag", "--list", "--format=%(contents)", "v0.2.0") == notes.strip()
    assert "### If you rendered an earlier version\n- Rename" in notes
    assert "Not in the notes" not in notes
    assert git(remote, "tag") == "v0.1.0"
    assert git(remote, "rev-parse", "trunk") == before
    assert "the last release is v0.2.0" in release(clone, "0.2.0", "--checked").stderr
