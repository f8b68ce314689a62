"""An installation of the tested versions: the lock, uv, the image and the devcontainer."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support import REPO, TEMPLATE, Render

LOCK = TEMPLATE / "requirements.lock"
LISTS = ("requirements.txt", "requirements-dev.txt")
BESIDE = Path(sys.executable).parent
# Where a project may be installed: what decides which of several pins of a package holds.
PLACES = [
    {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": system,
        "platform_machine": machine,
    }
    for python in ("3.10", "3.11", "3.12", "3.13", "3.14")
    for system, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
]


def pins(lock: Path) -> list[tuple[Requirement, list[str]]]:
    """Read each pin of a lock with its hashes. Every line must belong to one."""
    text = re.sub(r"^#.*\n", "", lock.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.split(" --hash=") for line in text.replace("     --hash", " --hash").splitlines()]
    return [(Requirement(words[0]), [word.strip() for word in words[1:]]) for words in lines]


def holds(marker: Marker | None, place: dict[str, str]) -> bool:
    return marker is None or marker.evaluate({"extra": "", **place})


def versions(lock: Path, place: dict[str, str]) -> dict[str, Version]:
    """Return the one version of each package that holds in a place."""
    found: dict[str, Version] = {}
    for pin, _ in pins(lock):
        if holds(pin.marker, place):
            (specifier,) = pin.specifier
            assert specifier.operator == "==", pin
            assert pin.name not in found, f"{pin.name} twice for {place}"
            found[pin.name] = Version(specifier.version)
    return found


def wanted(folder: Path) -> list[Requirement]:
    """Read the two lists of a project."""
    lines = (line.partition("#")[0].strip() for name in LISTS for line in (folder / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def check_lock(lock: Path) -> None:
    """Each requirement has one pin on each platform, which it allows; nothing names an address."""
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text
    assert " @ " not in text
    assert "--index" not in text
    for pin, hashes in pins(lock):
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), pin
    for place in PLACES:
        locked = versions(lock, place)
        for requirement in wanted(lock.parent):
            name = canonicalize_name(requirement.name)
            assert requirement.specifier.contains(locked[name]), f"{requirement} is {locked[name]} on {place}"


def test_the_lock_has_what_the_lists_ask_for() -> None:
    check_lock(LOCK)


def test_the_lock_has_the_tested_versions() -> None:
    """After `make constraints` comes `make lock`."""
    lines = (line.partition("#")[0].strip() for line in (REPO / "constraints.txt").read_text().splitlines())
    place = {**PLACES[0], "python_version": "3.11", "python_full_version": "3.11.7"}
    tested: dict[str, Version] = {
        canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version)
        for pin in map(Requirement, filter(None, lines))
        if holds(pin.marker, place)
    }
    locked = versions(LOCK, place)
    assert {"torch", "numpy", "pytest"} <= locked.keys() & tested.keys()
    assert {name: version for name, version in locked.items() if tested.get(name, version) != version} == {}


def test_the_lock_has_what_they_bring_along() -> None:
    """Where something is missing, an installation with hashes takes any file of it."""
    locked, todo, seen = versions(LOCK, {}), wanted(TEMPLATE), set[str]()
    while todo:
        name = canonicalize_name(todo.pop().name)
        if name not in seen:
            seen.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            todo += [need for need in needs if holds(need.marker, {}) and need.name != "pip"]
    assert seen - locked.keys() == set()
    assert len(seen) > 40


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Read a Dockerfile: each instruction with its words, continued lines joined."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], re.sub(" +", " ", line.partition(" ")[2])) for line in lines]


def test_the_dockerfile_is_clean(render: Render) -> None:
    done = subprocess.run([BESIDE / "hadolint", render() / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_that_of_the_page(render: Render) -> None:
    """It runs as a user without rights, takes the tested uv, and has the commands that docs/install.md gives."""
    lines = instructions(render() / "Dockerfile")
    words = {word: [rest for name, rest in lines if name == word] for word, _ in lines}
    assert words["USER"][-1] == "1000"
    assert any(re.search(r"useradd .*--uid 1000 ", rest) for rest in words["RUN"])
    constraints = (REPO / "constraints.txt").read_text().splitlines()
    (uv,) = re.findall(r"\buv==\S+", " ".join(words["RUN"]))
    assert uv in constraints
    page = (render() / "docs" / "install.md").read_text(encoding="utf-8")
    installs = [command for rest in words["RUN"] for command in re.findall(r"uv pip install[^;]*", rest)]
    assert len(installs) == 2
    assert [command for command in installs if f"\n{command}\n" not in page] == []
    copied = {name for rest in words["COPY"] for name in rest.split()[:-1]}
    assert copied == {"requirements.lock", *LISTS}
    page = (render() / "docs" / "docker.md").read_text(encoding="utf-8")
    assert f"--build-arg {words['ARG'][0].partition('=')[0]}=cuda" in page
    json.loads(words["CMD"][0])


def test_the_devcontainer_is_that_image(render: Render) -> None:
    file = render() / ".devcontainer" / "devcontainer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    assert settings.keys() == {"build", "remoteUser", "runArgs", "hostRequirements", "customizations"}
    dockerfile = file.parent / settings["build"]["dockerfile"]
    lines = instructions(dockerfile)
    assert (file.parent / settings["build"]["context"]).resolve() == dockerfile.resolve().parent == render().resolve()
    declared = dict(rest.split("=") for name, rest in lines if name == "ARG")
    assert settings["build"]["args"] == declared == {"TORCH": "cpu"}
    assert any(name == "RUN" and re.search(rf"useradd .* {settings['remoteUser']}$", rest) for name, rest in lines)
    assert all(re.fullmatch(r"[\w-]+\.[\w-]+", name) for name in settings["customizations"]["vscode"]["extensions"])


def environment(**variables: str) -> dict[str, str]:
    """Return variables for a shell outside this environment, in which uv would install into it."""
    inside = ("VIRTUAL_ENV", "UV_", "PYTEST_", "CONDA_PREFIX")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(inside)}
    return {**kept, "PATH": f"{BESIDE}{os.pathsep}{kept['PATH']}", "PYTHONDONTWRITEBYTECODE": "1", **variables}


def shell(command: str, folder: Path, variables: dict[str, str], *, fails: bool = False) -> str:
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert bool(done.returncode) == fails, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def project(render: Render, tmp_path: Path) -> Path:
    """A copy to install."""
    return Path(shutil.copytree(render(), tmp_path / "project"))


@pytest.mark.slow
@pytest.mark.full
def test_make_lock_writes_it_anew(project: Path) -> None:
    """Also where there is none, and with the tested versions that the template adds."""
    lock = project / "requirements.lock"
    lock.unlink()
    shell(f"make lock ARGS='-c {REPO / 'constraints.txt'}'", project, environment())
    check_lock(lock)
    assert versions(lock, {})["torch"] == versions(LOCK, {})["torch"]
    assert str(REPO) not in lock.read_text()


@pytest.mark.slow
def test_uv_installs_the_lock_and_no_other_file(project: Path) -> None:
    """The whole list, with CUDA, is resolved to the pins of this platform; a file with another hash is refused."""
    shell(f"uv venv -q -p {sys.executable}", project, environment())
    command = "uv pip install -r requirements.txt -r requirements-dev.txt -c requirements.lock"
    said = shell(f"{command} --dry-run", project, environment())
    chosen = dict(re.findall(r"^ \+ (\S+)==(\S+)$", said, flags=re.MULTILINE))
    locked = {name: str(version) for name, version in versions(LOCK, {}).items()}
    assert len(chosen) > 60
    assert {name: version for name, version in chosen.items() if locked.get(name) != version} == {}
    lock = project / "requirements.lock"
    text = lock.read_text()
    entry = re.search(r"^tqdm==(.*\n)(    .*\n)+", text, flags=re.MULTILINE)
    assert entry
    lock.write_text(text.replace(entry[0], re.sub(r"sha256:\w{8}", "sha256:00000000", entry[0])))
    (project / "tqdm.txt").write_text("tqdm\n")
    assert "Hash mismatch" in shell(
        "uv pip install -r tqdm.txt -c requirements.lock", project, environment(), fails=True
    )
    lock.write_text(text)
    shell("uv pip install -r tqdm.txt -c requirements.lock", project, environment())


def cpu_build(command: str) -> dict[str, str]:
    """Let uv take the CPU build of torch from the folder that pip is told of, where there is one."""
    get = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    said = subprocess.run(get, capture_output=True, text=True, check=False).stdout
    for folder in [*os.environ.get("PIP_FIND_LINKS", "").split(), *said.split()]:
        wheels = Path(folder).glob(f"torch-*+cpu-cp{sys.version_info.major}{sys.version_info.minor}-*")
        if "--torch-backend" in command and any(wheels):
            return {"UV_FIND_LINKS": folder, "UV_OFFLINE": "1"}
    return {}


def check_installed(python: str, project: Path, variables: dict[str, str]) -> None:
    """The environment has the versions of the lock, torch for CPUs; the project trains there."""
    code = "from importlib import metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    pairs = (word.split("==") for word in shell(f'{python} -c "{code}"', project, variables).split())
    installed: dict[str, Version] = {canonicalize_name(name): Version(version) for name, version in pairs}
    locked = versions(LOCK, {})
    assert {canonicalize_name(requirement.name) for requirement in wanted(project)} <= installed.keys()
    tools = {"pip", "uv", "setuptools"}  # of the environment itself
    others = {name: version for name, version in installed.items() if Version(version.public) != locked.get(name)}
    assert others.keys() <= tools
    assert installed["torch"].local == "cpu"
    assert not any(name.startswith("nvidia") for name in installed)
    options = "--config configs/default.yaml --progress.max_steps 2 --monitor.writers []"
    shell(f"{python} train.py {options}", project, {**variables, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_fresh_environment_by_uv(project: Path) -> None:
    """The commands of docs/install.md for a CPU, one after the other."""
    page = (project / "docs" / "install.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (block,) = (text for text in blocks if "uv pip install --no-deps" in text)
    for command in block.splitlines():
        shell(command, project, environment(**cpu_build(command)))
    check_installed(".venv/bin/python", project, environment())


@pytest.mark.slow
@pytest.mark.full
def test_the_commands_of_the_image(project: Path, tmp_path: Path) -> None:
    """Without Docker: each command of the Dockerfile but the one that makes a user, in an environment of its own."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for name, command in instructions(project / "Dockerfile"):
        if name == "RUN" and not command.startswith("useradd"):
            variables = environment(VIRTUAL_ENV=str(venv), TORCH="cpu", **cpu_build(command))
            shell(command, project, {**variables, "PATH": f"{venv / 'bin'}{os.pathsep}{variables['PATH']}"})
    check_installed(str(venv / "bin" / "python"), project, environment())
