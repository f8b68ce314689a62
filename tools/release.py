"""Makes a release of this commit: checks everything, keeps a run of it, writes the notes, and tags. It never pushes.

    python tools/release.py 0.2.0 [--checked]

Everything that is missing is named at once, before anything is written. --checked: `make test-full` has passed for this
commit, so that it is not run again. The kept run and template become a commit of their own, which gets the tag.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import earlier_run

REPO = Path(__file__).resolve().parent.parent
TODO = "### If you rendered an earlier version"
NOTES = REPO / "release-notes.md"  # ignored by git
# Where the version stands. One that is not there, or names none, is no problem; the first three must.
NUMBERS = {
    "cookiecutter.json": r'"_template_version": "(.*)"',
    "{{cookiecutter.proj_name}}/common/VERSION": r"(.*)",
    "CHANGELOG.md": r"\A(?s:.*?)^## (\S+)",
    "CITATION.cff": r"^version: [\"']?([^\"'\n]+)",
    "README.md": r"--(?:checkout|vcs-ref) v(\d\S*)",
}


def main(version: str, checked: bool) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"a version has three numbers, as 0.2.0, not {version!r}")
    if problems := [*problems_of_git(version), *problems_of_numbers(version), *problems_of_changelog(version)]:
        sys.exit("\n  ".join([f"{version} cannot be released:", *problems]))
    if not checked and subprocess.run(["make", "test-full"], cwd=REPO, check=False).returncode:
        sys.exit(f"{version} cannot be released: a test failed")
    tag = f"v{version}"
    print(f"== keeping a run of {tag}", flush=True)
    earlier_run.main("HEAD", tag)
    git("add", "tests/template/earlier_runs", "tests/template/earlier_templates")
    git("commit", "--quiet", "--message", f"Keep the template and a run of {tag}")
    NOTES.write_text(f"{tag}\n\n{section(version)}\n", encoding="utf-8")
    git("tag", "--annotate", tag, "--file", str(NOTES), "--cleanup=whitespace")
    branch = git("branch", "--show-current") or "HEAD:main"
    print(f"{tag} is tagged here; its notes are in {NOTES.name}. Look at both, then: git push origin {branch} {tag}")


def problems_of_git(version: str) -> Iterator[str]:
    if changed := git("status", "--porcelain").splitlines():
        yield f"{len(changed)} files are not committed: {', '.join(line[3:] for line in changed[:3])}"
    tags = [tag for tag in git("tag", "--list", "v*").splitlines() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    last = max(tags, key=order, default=None)
    if last is not None and order(last) >= order(version):
        yield f"the last release is {last}; if its tag is wrong and was never pushed: git tag --delete {last}"


def problems_of_numbers(version: str) -> Iterator[str]:
    for number, (name, pattern) in enumerate(NUMBERS.items()):
        path = REPO / name
        said = set(re.findall(pattern, path.read_text("utf-8"), re.MULTILINE) if path.is_file() else ()) - {""}
        if others := sorted(said - {version}):
            yield f"{name} says {', '.join(others)}"
        if not said and number < 3:
            yield f"{name} names no version"
    migrations = re.findall(r"^  - version: v?([\d.]+)$", (REPO / "copier.yml").read_text("utf-8"), re.MULTILINE)
    for later in (other for other in migrations if order(other) > order(version)):
        yield f"copier.yml has a migration to {later}"


def problems_of_changelog(version: str) -> Iterator[str]:
    text = section(version)
    if text is None:
        yield f"CHANGELOG.md has no section ## {version}"
        return
    if not re.match(r"\d{4}-\d\d-\d\d\n", text):
        yield f"CHANGELOG.md: the first line below ## {version} must be the date, as 2026-11-30"
    todo = text.partition(f"{TODO}\n")[2].partition("\n### ")[0]
    if not todo.strip():
        yield f'CHANGELOG.md: {version} does not say what an owner has to do, below "{TODO}"; "- Nothing." will do'


def section(version: str) -> str | None:
    """Return what CHANGELOG.md says of a version; None if it has no section of it."""
    text = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else None


def order(version: str) -> list[int]:
    return [int(number) for number in version.removeprefix("v").split(".")]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.rstrip()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--checked"]
    if len(words) != 1 or not words[0]:
        sys.exit("say which version: make release VERSION=0.2.0")
    main(words[0], "--checked" in sys.argv)
