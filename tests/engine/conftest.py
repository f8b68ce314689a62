"""Tests of the engine: what an owner need not carry, tested on the very files that he gets.

They use the fixtures, the small parts and the settings of the project's own tests.  python -m pytest tests/engine
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS.parent / "{{cookiecutter.proj_name}}"))

import tests.conftest  # noqa: E402 - it lies in the folder above

pytest_plugins = ["tests.conftest"]
PICTURES = ("--pictures.number", "8")  # options of a run with pictures, as runs usually have
AVERAGED = ("--optim.ema.decay", "0.9")  # options of a run with averaged weights
# Programs that they start find the parts in these files, `engine.x.test_y.Part`, too.
tests.conftest.ENVIRONMENT["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
# What they say is compared word by word, with the names of the parts that a project has at first.
tests.conftest.CONFIG = Path(__file__).with_name("base.yaml")
tests.conftest.SMALL["--config"] = str(tests.conftest.CONFIG)
