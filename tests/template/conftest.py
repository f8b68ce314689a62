"""Renders each set of answers once a session."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from real import NOT_RUN, REPORT
from support import TIMES, Render, fresh, hook_text

# Their tests are long and share nothing, so each goes to the next free process.
INDEPENDENT = {
    f"test_{name}.py" for name in ("answers", "check", "leaves", "ops_recipe", "ownership", "project", "update")
}


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the tests of a file to one process, since they share what they start.

    `--dist loadgroup` does nothing with pytest 9.2 (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return nodeid if Path(path).name in INDEPENDENT else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what really ran: a stand-in proves little, and a skipped test nothing."""
    for ran in REPORT:
        terminalreporter.write_line(f"really ran: {ran}")
    for test in NOT_RUN:
        terminalreporter.write_line(f"not run: {test}")
    if TIMES:
        steps = list(dict.fromkeys(step for _, step, _ in TIMES))
        terminalreporter.write_line(f"seconds   {'  '.join(steps)}")
        for row in sorted({row for row, _, _ in TIMES}):
            taken = {step: seconds for name, step, seconds in TIMES if name == row}
            cells = (f"{taken[step]:.0f}" if step in taken else "-" for step in steps)
            line = "  ".join(cell.rjust(len(step)) for cell, step in zip(cells, steps, strict=True))
            terminalreporter.write_line(f"{row}  {line}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With several test processes, each hands on what it has to say."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"ran": REPORT, "not_run": NOT_RUN, "times": TIMES}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """And here it arrives."""
    output = getattr(node, "workeroutput", {})
    REPORT.extend(output.get("ran", ()))
    NOT_RUN.extend(output.get("not_run", ()))
    TIMES.extend((row, step, seconds) for row, step, seconds in output.get("times", ()))


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cookiecutter configuration of no user, which writes nothing into a home folder."""
    home = tmp_path_factory.mktemp("home")
    lines = (f"{key}: {json.dumps(str(home / key))}\n" for key in ("cookiecutters_dir", "replay_dir"))
    path = home / "config.yaml"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory, settings: Path) -> Render:
    """render(license="none", ...) -> the project's folder. Shared by all tests: look, do not touch."""
    done: dict[str, Path] = {}

    def rendered(**answers: str) -> Path:
        key = json.dumps(answers, sort_keys=True)
        if key not in done:
            done[key] = fresh(tmp_path_factory.mktemp("out"), settings, **answers)
        return done[key]

    return rendered


@pytest.fixture(scope="session")
def pre_gen() -> ModuleType:
    return _module("pre_gen_project")


@pytest.fixture(scope="session")
def post_gen() -> ModuleType:
    return _module("post_gen_project")


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(hook_text(name, {}), f"hooks/{name}.py", "exec"), module.__dict__)
    return module
