"""The commands that only `make test-full` runs: each names tests that are there, by markers that its folder knows."""

import os
import shlex
import subprocess
import sys

import pytest

from support import REPO


def commands(target: str) -> list[str]:
    """Return the calls of pytest in a target of the Makefile."""
    done = subprocess.run(["make", "-n", target], cwd=REPO, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if " -m pytest " in line]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("number", range(4))
def test_a_tier_finds_its_tests(number: int) -> None:
    """An unregistered marker in an expression ends pytest, here before an hour of other tests."""
    command = commands("test-full")[-4:][number]
    for path in {word for word in shlex.split(command) if word.endswith("/python")}:
        command = command.replace(path, sys.executable)
    words = f"{command} --collect-only -n 0"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, shell=True, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_tier_is_tried() -> None:
    """The first six commands are those of `make test-all`, which runs them itself."""
    assert commands("test-full")[:-4] == commands("test-all")
