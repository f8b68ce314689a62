"""What comes out of cookiecutter: which files, with what in them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import NON_DEFAULT, RECORD, RENDERED, REPO, TABLE, TEMPLATE, Render, copy_of_template, files, fresh

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOSTILE = [
    {"description": 'say "hi" \\ to: #1', "author_name": "Zoë O'Neil"},
    {"description": "", "author_name": '"""'},
    {"description": "ends in a backslash \\", "author_name": "back\\slash \\"},
    {"description": "<!-- 漢字 😀 ``` ]]> '''", "author_name": "  "},
    {"description": "# a heading? [x]: y", "author_name": 'A: B # "C" <d@e.org>'},
]
GITHUB = {".github/workflows/ci.yml", ".github/dependabot.yml"}
NAMES = ["quotes", "empty", "backslash", "letters", "markup"]
LICENCES = {
    "MIT": ("MIT License", "DEALINGS IN THE\nSOFTWARE."),
    "Apache-2.0": ("                                 Apache License\n", "limitations under the License."),
    "BSD-3-Clause": ("BSD 3-Clause License", "POSSIBILITY OF SUCH DAMAGE."),
}


def pyproject(project: Path) -> dict[str, dict[str, object]]:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))


def test_all_parts_give_every_file_of_the_template(render: Render) -> None:
    """Nothing but the examples is lost, nothing but the record of the answers is added."""
    project = render()
    assert files(project).keys() == files(TEMPLATE).keys() - examples() - {"leaves.yaml"} | {RECORD}
    assert list(project.rglob("examples")) == []


def test_other_answers_drop_and_rename_files(render: Render) -> None:
    """Licence, workflow and operators go, `custom/` is called `spinlab/`, all else stays."""
    dropped = {"LICENSE", "leaves.yaml", *GITHUB, *operators()}
    expected = {re.sub(r"^custom/", "spinlab/", path) for path in files(TEMPLATE).keys() - dropped} | {RECORD}
    project = render(**NON_DEFAULT)
    assert files(project).keys() == expected
    assert not (project / ".github").exists()
    assert not (project / "custom").exists()
    assert list(project.rglob("ops")) == []


def operators() -> set[str]:
    """Return every file of the template that is there for operators alone."""
    whole = (".clang-format", "configs/ops.yaml", "scripts/install_ops.sh", "custom/ops/saturating_model.py")
    return {path for path in files(TEMPLATE) if "/ops/" in path or "kernels_on_cpu" in path or path in whole}


def examples() -> set[str]:
    """Return every file of the template that is there for the examples alone."""
    found = {path for path in files(TEMPLATE) if path.startswith(("examples/", "tests/examples/"))}
    assert len(found) > 60
    return found


def test_nothing_else_speaks_of_the_examples(render: Render) -> None:
    """Without them, no file imports them or names one of their files."""
    for path, file in files(render()).items():
        left = re.search(rb"examples[/.]\w", file.read_bytes())
        assert left is None, f"{path}: {left}"


def test_nothing_else_speaks_of_the_operators(render: Render) -> None:
    """Without them, no file imports them or names one of their files."""
    for path, file in files(render(parts="core")).items():
        words = rb"install_ops|ops\.yaml|custom/ops/|custom[.]ops|common[./]ops|scale_exp|saturating"
        left = re.search(words, file.read_bytes())
        assert left is None or path in (".gitignore", "README.md"), f"{path}: {left}"


def test_each_option_works_alone(render: Render) -> None:
    default = files(render()).keys()
    assert default - files(render(license="none")).keys() == {"LICENSE"}
    assert default - files(render(ci="none")).keys() == GITHUB
    assert default - files(render(parts=NON_DEFAULT["parts"])).keys() == operators()
    assert files(render(examples="all")).keys() - default == examples()
    assert (render(custom_name="spinlab") / "LICENSE").is_file()


def test_the_usual_parts_are_asked_for(render: Render) -> None:
    """By default; they can be joined with others."""
    default, usual = files(render(parts="usual")), [name for name, part in TABLE.items() if part.get("usual")]
    assert json.loads((REPO / "cookiecutter.json").read_text(encoding="utf-8"))["parts"] == "usual"
    assert len(usual) > 5
    assert default.keys() == files(render(parts=" ".join(usual))).keys()
    more = files(render(parts="usual, sweep")).keys() - default.keys()
    assert "docs/tools/sweep.md" in more
    assert all("sweep" in path for path in more)


def test_code_is_copied_byte_for_byte(render: Render) -> None:
    """Only the named files are rendered; all others are the template's own, with their permissions."""
    project = files(render(examples="all"))
    for path, source in files(TEMPLATE).items():
        if path not in RENDERED | {"leaves.yaml"}:
            assert project[path].read_bytes() == source.read_bytes(), path
            assert project[path].stat().st_mode & 0o777 == source.stat().st_mode & 0o777, path


def test_only_the_named_files_hold_placeholders() -> None:
    found = {path for path, file in files(TEMPLATE).items() if b"{{ cookiecutter" in file.read_bytes()}
    assert found == RENDERED


@pytest.mark.parametrize("answers", [{}, NON_DEFAULT, *HOSTILE], ids=["default", "other", *NAMES])
def test_no_placeholder_is_left(render: Render, answers: dict[str, str]) -> None:
    for path, file in files(render(**answers)).items():
        if path.endswith(".npz"):
            continue
        text = file.read_bytes()
        for rest in (b"{{ cookiecutter", b"{{cookiecutter", b"{%", b"cookiecutter."):
            assert rest not in text, f"{rest!r} in {path}"


def test_all_lines_end_in_lf(render: Render) -> None:
    for path, file in files(render()).items():
        if not path.endswith(".npz"):
            text = file.read_bytes()
            assert b"\r" not in text, path
            assert not text or text.endswith(b"\n"), f"{path} has no newline at its end"


@pytest.mark.parametrize("answers", HOSTILE, ids=NAMES)
def test_any_text_survives_as_description_and_author(render: Render, answers: dict[str, str]) -> None:
    """Quotes, backslashes, colons, hashes and other letters are data."""
    project = render(**answers)
    author = answers["author_name"].strip() or "The my_project authors"
    meta = pyproject(project)["project"]
    assert meta["description"] == answers["description"]
    assert meta["authors"] == [{"name": author}]
    assert f" {author}\n" in (project / "LICENSE").read_text(encoding="utf-8")
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# my_project\n\n")
    assert f"\n> {answers['description']}\n\n" in readme if answers["description"] else "> \n" not in readme


@pytest.mark.parametrize("name", LICENCES)
def test_licence_is_complete_and_names_the_author(render: Render, name: str) -> None:
    """The licence is the project's, not the template's."""
    project = render(license=name, author_name="Ada Lovelace")
    text = (project / "LICENSE").read_text(encoding="utf-8")
    start, end = LICENCES[name]
    assert text.startswith(start)
    assert text.endswith(end + "\n")
    assert re.search(r"Copyright (\(c\) )?20\d\d,? Ada Lovelace\n", text)
    assert pyproject(project)["project"]["license"] == name


def test_no_licence_is_really_none(render: Render) -> None:
    project = render(license="none")
    assert not (project / "LICENSE").exists()
    assert pyproject(project)["project"]["license"] == "LicenseRef-None"


def test_package_metadata_is_valid(render: Render) -> None:
    """The names that packaging tools will see."""
    meta = pyproject(render(**NON_DEFAULT))
    assert meta["project"]["name"] == "spin-lab"
    assert "spinlab" in json.dumps(meta["tool"]["setuptools"])


@pytest.mark.slow
def test_an_editable_installation_is_possible(render: Render, tmp_path: Path) -> None:
    """Its modules can be imported from elsewhere."""
    project = Path(shutil.copytree(render(), tmp_path / "project"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, "-e", "."], cwd=project, capture_output=True, check=True)
    code = "import site, sys; site.addsitedir(sys.argv[1]); import common.trainer, custom.config"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, check=True)


def test_git_takes_every_file(tmp_path: Path, settings: Path) -> None:
    """None of them is ignored, under any name of the package: here one that many .gitignore files know."""
    project = fresh(tmp_path, settings, custom_name="target", examples="all")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=project, input="\n".join(files(project)), text=True, capture_output=True
    )
    assert [name for name in ignored.stdout.splitlines() if not name.startswith(".git/")] == []


def test_version_is_the_same_everywhere(render: Render) -> None:
    version = json.loads((REPO / "cookiecutter.json").read_text())["_template_version"]
    assert (render() / "common/VERSION").read_text() == f"{version}\n"
    headings = re.findall(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == version


def test_renamed_project_names_custom_nowhere(render: Render) -> None:
    """No import, path or quoted name is left, in any file; and what is left compiles."""
    project = render(**NON_DEFAULT)
    for path, file in files(project).items():
        text = file.read_bytes().decode("utf-8", errors="replace")
        left = re.search(r"custom[./\\]|[\"'`]custom\b|(from|import) custom\b", text)
        assert left is None, f"{path}: {left}"
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_command_line_with_a_strangers_settings(tmp_path: Path) -> None:
    """The real command, with answers on the line, and with a user's own defaults that fit another template."""
    config = tmp_path / "config.yaml"
    config.write_text(
        'default_context: {author_name: "Zoë D\'Arc", license: GPL, project_slug: x, description: theirs}\n'
        f"cookiecutters_dir: {json.dumps(str(tmp_path / 'c'))}\nreplay_dir: {json.dumps(str(tmp_path / 'r'))}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "cookiecutter", str(REPO), "--no-input", "--config-file", str(config)]
    command += ["-o", str(tmp_path), "proj_name=spin-lab", "custom_name=spinlab", "ci=none"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    project = tmp_path / "spin-lab"
    assert "Zoë D'Arc" in (project / "LICENSE").read_text(encoding="utf-8")
    assert (project / "spinlab").is_dir()
    steps = re.findall(r"^  (\S.*)$", done.stdout, flags=re.MULTILINE)
    assert len(steps) == 5
    assert steps[0] == "cd spin-lab"
    assert steps[-1].startswith("git init && ")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with the template in it, of one commit; cookiecutter wants to see "git" in an address."""
    folder = copy_of_template(tmp_path / "template.git")
    for words in ("init --quiet", "add --all", "-c user.name=A -c user.email=a@example.org commit --quiet -m first"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    return folder


def recorded(settings: Path, folder: Path, template: str, *words: str) -> str:
    """Render with the real command in `folder`; return what the project says of where it comes from."""
    command = [sys.executable, "-m", "cookiecutter", template, "--no-input", "--config-file", str(settings), *words]
    subprocess.run([*command, "-o", "out", "proj_name=spin-lab"], cwd=folder, check=True, capture_output=True)
    return (folder / "out" / "spin-lab" / RECORD).read_text(encoding="utf-8")


def test_the_project_knows_where_it_comes_from(tmp_path: Path, settings: Path, repository: Path) -> None:
    """Address, commit and answers; the version is in common/VERSION. Of a clone, as of an address on the web."""
    git = ["git", "-C", str(repository)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    address = f"file://{repository}"
    said = yaml.safe_load(recorded(settings, tmp_path, address, 'description=Zoë\'s: "yes"', "parts=core"))
    assert said.pop("_commit") == head
    assert said.pop("_src_path") == address
    asked = json.loads((REPO / "cookiecutter.json").read_text())
    assert said.keys() == {key for key in asked if not key.startswith("_")}
    assert (said["proj_name"], said["parts"], said["description"]) == ("spin-lab", "core", 'Zoë\'s: "yes"')
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    again = recorded(settings, tmp_path, str(repository), "-f")
    assert f"_commit: {head}\n" in again  # read in the template's own folder, here from a file of all branches
    assert recorded(settings, tmp_path, str(repository), "-f") == again


def test_a_work_tree_has_a_commit(tmp_path: Path, settings: Path, repository: Path) -> None:
    """Where `.git` is a file, and the commit is not that of the repository's own folder."""
    git = ["git", "-C", str(repository)]
    subprocess.run([*git, "worktree", "add", "--quiet", "-b", "side", "../side"], check=True, capture_output=True)
    mine = ["-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--allow-empty", "-m", "second"]
    subprocess.run(["git", *mine], cwd=tmp_path / "side", check=True)
    heads = subprocess.run([*git, "rev-parse", "side", "HEAD"], check=True, capture_output=True, text=True).stdout
    side, main = heads.split()
    assert side != main
    assert f"_commit: {side}\n" in recorded(settings, tmp_path, "side")


@pytest.mark.parametrize(
    "given",
    [
        "./template",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("template", "../{}/template", "{}/template")),
    ],
)
def test_a_path_is_recorded_from_the_root(tmp_path: Path, settings: Path, given: str) -> None:
    """`copier update` finds it from the project's folder; a folder that is no repository has no commit."""
    copy_of_template(tmp_path / "template")
    said = yaml.safe_load(recorded(settings, tmp_path, given.format(tmp_path.name if given[0] == "." else tmp_path)))
    assert said.pop("_src_path") == str(tmp_path / "template")
    assert "_commit" not in said
    assert not [value for value in said.values() if str(value).startswith("/")]


def test_prompts_cover_every_question() -> None:
    answers = json.loads((REPO / "cookiecutter.json").read_text())
    prompts = answers["__prompts__"]
    questions = {key for key in answers if not key.startswith("_")}
    assert prompts.keys() == questions
    for key in questions:
        if isinstance(answers[key], list):
            assert prompts[key].keys() == {"__prompt__", *answers[key]}


def test_every_copied_kind_is_needed_or_planned() -> None:
    """A pattern that names a file in full must still match one."""
    patterns = json.loads((REPO / "cookiecutter.json").read_text())["_copy_without_render"]
    plain = [pattern for pattern in patterns if "*" not in pattern]
    assert [pattern for pattern in plain if not (TEMPLATE / pattern).is_file()] == []


@pytest.mark.skipif(os.name == "nt", reason="needs make")
def test_make_names_a_python_that_is_not_there(tmp_path: Path) -> None:
    """And asks for no package of Debian's, which would not help."""
    words = ["make", "setup", f"VENV={tmp_path}/.venv", "PYTHON=/nowhere/python3"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no Python >= 3.10 was found as /nowhere/python3; name one: make setup PYTHON=" in done.stderr
    assert "apt" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs make")
def test_make_help_lists_every_target(render: Render) -> None:
    text = (render() / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)[1].split())  # type: ignore[index]
    done = subprocess.run(["make", "help"], cwd=render(), capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make (\S+)", done.stdout, flags=re.MULTILINE)) == targets
