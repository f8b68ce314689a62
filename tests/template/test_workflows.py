"""What GitHub runs and reads: workflows, the bump of their actions, forms, the citation; here and in a project."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import NON_DEFAULT, REPO, TEMPLATE, Render
from test_render import HOSTILE, NAMES

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
PROJECTS = sorted((TEMPLATE / ".github" / "workflows").glob("*.yml"))
CITATION = REPO / "CITATION.cff"
PINNED = re.compile(r"uses: ([\w.-]+/[\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)\n")
WORKFLOW = """on: push
jobs:
  a:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - run: echo ${{ github.head_ref }} ${{ matrix.b }} $(ls *.txt
"""


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def lint(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Check every workflow of a repository, and its dependabot.yml."""
    command = [tool("jactionlint"), "--format", "oneline", "--shellcheck", tool("shellcheck"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(file.read_text())["jobs"])


def test_workflows_are_found() -> None:
    assert [file.name for file in WORKFLOWS] == ["canary.yml", "ci.yml"]
    assert [file.name for file in PROJECTS] == ["ci.yml"]


def test_workflows_have_no_mistakes(render: Render, tmp_path: Path) -> None:
    """Of the template, and of a project with a workflow; one without has nothing that GitHub would run."""
    for folder, words in ((REPO, ()), (render(), ("--ignore", "duplicate-triggers"))):
        # An owner may work on branches without pull requests, so a project's tests run for both.
        inside = shutil.copytree(folder / ".github", tmp_path / folder.name / ".github").parent
        subprocess.run(["git", "init", "-q"], cwd=inside, check=True)
        done = lint(inside, *words)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert not (render(**NON_DEFAULT) / ".github").exists()


def test_the_linter_finds_mistakes(tmp_path: Path) -> None:
    """An action by its tag, no permissions, a name from outside in a script, an unknown value, a broken script."""
    file = tmp_path / ".github" / "workflows" / "a.yml"
    file.parent.mkdir(parents=True)
    file.write_text(WORKFLOW)
    found = lint(tmp_path, str(file)).stdout
    for word in ("pinned to a full-length commit SHA", "permissions", "head_ref", '"b" is not defined', "SC1009"):
        assert word in found, (word, found)


@pytest.mark.parametrize("file", [*WORKFLOWS, *PROJECTS], ids=lambda file: f"{file.parents[2].name[:2]}-{file.stem}")
def test_actions_are_pinned_and_rights_are_few(file: Path) -> None:
    """A tag can be moved to other code. Only a job that says so may do more than read, and none keeps the token."""
    text = file.read_text()
    assert len(PINNED.findall(text)) == text.count("uses:")
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    for name, job in jobs(file).items():
        assert job.get("permissions", {}) == ({"issues": "write"} if name == "report" else {})
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_both_trees_pin_the_same_commits() -> None:
    """The bump of one that forgets the other is found here, and not by an owner a year later."""
    pins = {pin for file in (*WORKFLOWS, *PROJECTS) for pin in PINNED.findall(file.read_text())}
    assert len(pins) == len({name for name, _, _ in pins}) == 3


def test_workflows_call_what_is_there() -> None:
    """Every `make` target and every script, with the Makefile of its folder."""
    for file, root in [(file, REPO) for file in WORKFLOWS] + [(file, TEMPLATE) for file in PROJECTS]:
        for job in jobs(file).values():
            for step in job["steps"]:
                folder = TEMPLATE if "my_project" in step.get("working-directory", "") else root
                for call in re.findall(r"^make (.+)$", step.get("run", ""), re.MULTILINE):
                    words = [word for word in shlex.split(call) if "$" not in word]  # a path of that machine
                    done = subprocess.run(
                        ["make", "-n", *words], cwd=folder, capture_output=True, text=True, check=False
                    )
                    assert done.returncode == 0, f"{file}: make {call}\n{done.stderr}"
                for script in re.findall(r"bash (\S+)", step.get("run", "")):
                    assert (folder / script).is_file()


def test_the_bounds_of_the_requirements_are_tried() -> None:
    """Oldest and newest: the Python of pyproject.toml with the lowest versions, and a newer one with the highest."""
    tried = {
        (row["python"], row["resolution"]) for row in jobs(WORKFLOWS[1])["bounds"]["strategy"]["matrix"]["include"]
    }
    newest = max((python for python, _ in tried), key=lambda python: int(python.partition(".")[2]))
    assert 'requires-python = ">=3.10"' in (TEMPLATE / "pyproject.toml").read_text()
    assert tried == {("3.10", "lowest-direct"), (newest, "highest")}
    for file, job in ((WORKFLOWS[0], "newest"), (PROJECTS[0], "test")):
        assert jobs(file)[job]["strategy"]["matrix"]["python"] == ["3.10", newest]


@pytest.mark.parametrize("opened", ["", "17"], ids=["the first failure", "a later one"])
def test_the_canary_opens_one_issue(tmp_path: Path, opened: str) -> None:
    """The script itself, with a stand-in for GitHub's command that notes how it was called."""
    gh = tmp_path / "gh"
    gh.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nwith open('calls.jsonl', 'a') as log:\n"
        "    print(json.dumps(sys.argv[1:]), file=log)\n"
        "if sys.argv[1:3] == ['issue', 'list']:\n    print(os.environ['OPENED'])\n"
    )
    gh.chmod(0o755)
    report = jobs(WORKFLOWS[0])["report"]
    assert (report["needs"], report["if"]) == (["newest", "audit"], "failure()")
    (step,) = report["steps"]
    address = "https://example.org/runs/1"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": address, "OPENED": opened}
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=variables, check=True)
    label, listed, told = (json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines())
    assert label[:3] == ["label", "create", "canary"]
    assert listed[:6] == ["issue", "list", "--state", "open", "--label", "canary"]
    assert told[:2] == ["issue", "comment" if opened else "create"]
    assert told[2] == "17" if opened else "--title" in told
    assert address in told[told.index("--body") + 1]


def schema(name: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    command = [tool("check-jsonschema"), "--builtin-schema", f"vendor.{name}", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_files_for_github_fit_their_schemas(render: Render) -> None:
    """The newer commits of actions, and the workflows once more, by the schemas that editors use."""
    for folder in (REPO, render()):
        for name, pattern in (("dependabot", "dependabot.yml"), ("github-workflows", "workflows/*.yml")):
            paths = sorted((folder / ".github").glob(pattern))
            done = schema(name, *paths)
            assert paths
            assert done.returncode == 0, done.stdout


def test_the_bump_finds_every_workflow() -> None:
    """GitHub looks for workflows in .github/workflows of `/`, and in no folder below that is not named."""
    entry, *rest = yaml.safe_load((REPO / ".github" / "dependabot.yml").read_text())["updates"]
    assert not rest
    assert entry["directories"][0] == "/"
    named = [path for path in REPO.glob(entry["directories"][1].lstrip("/")) if path.parent.parent != REPO]
    assert named == [TEMPLATE / ".github" / "workflows"]


def test_forms_and_citation_fit_their_schemas() -> None:
    forms = sorted((REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    settings = forms.pop([form.name for form in forms].index("config.yml"))
    assert len(forms) == 2
    found = (("github-issue-forms", forms), ("github-issue-config", [settings]), ("citation-file-format", [CITATION]))
    for name, paths in found:
        done = schema(name, *paths)
        assert done.returncode == 0, done.stdout
    about = yaml.safe_load(CITATION.read_text())
    assert about["version"] == json.loads((REPO / "cookiecutter.json").read_text())["_template_version"]


def test_a_schema_refuses_a_mistake(tmp_path: Path) -> None:
    """A form with a field that GitHub does not know, a citation without authors."""
    form, citation = tmp_path / "a.yml", tmp_path / "CITATION.cff"
    form.write_text("name: a\ndescription: b\nbody: [{type: slider, attributes: {label: c}}]\n")
    citation.write_text("cff-version: 1.2.0\nmessage: a\ntitle: b\n")
    assert schema("github-issue-forms", form).returncode == 1
    assert "'authors' is a required property" in schema("citation-file-format", citation).stdout


@pytest.mark.parametrize("answers", [{}, NON_DEFAULT, *HOSTILE], ids=["default", "other", *NAMES])
def test_a_project_can_be_cited(render: Render, answers: dict[str, str]) -> None:
    """With the answers as they are, whatever they hold."""
    project = render(**answers)
    done = schema("citation-file-format", project / "CITATION.cff")
    assert done.returncode == 0, done.stdout
    about = yaml.safe_load((project / "CITATION.cff").read_text(encoding="utf-8"))
    name, licence = answers.get("proj_name", "my_project"), answers.get("license", "MIT")
    assert about["title"] == name
    assert about["authors"] == [{"name": answers.get("author_name", "").strip() or f"The {name} authors"}]
    assert about.get("abstract", "") == answers.get("description", "A PyTorch project")
    assert about.get("license", "none") == licence
