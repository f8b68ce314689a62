"""Renders each set of answers once a session."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from real import NOT_RUN, REPORT
from support import Render, fresh, hook_text


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of a file share what they start, so one process runs them; those of leaves are long and independent."""
    if item.path.name != "test_leaves.py":
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what really ran: a stand-in proves little, and a skipped test nothing."""
    for ran in REPORT:
        terminalreporter.write_line(f"really ran: {ran}")
    for test in NOT_RUN:
        terminalreporter.write_line(f"not run: {test}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With several test processes, each hands on what it has to say."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"ran": REPORT, "not_run": NOT_RUN}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """And here it arrives."""
    output = getattr(node, "workeroutput", {})
    REPORT.extend(output.get("ran", ()))
    NOT_RUN.extend(output.get("not_run", ()))


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
