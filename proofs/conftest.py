"""The proofs of the engine: what an owner need not carry, tested on the very files that he gets.

They use the fixtures, the small parts and the settings of the project's own tests.  python -m pytest proofs
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "{{cookiecutter.proj_name}}"))

from tests.conftest import ENVIRONMENT  # noqa: E402 - it lies in the folder above

pytest_plugins = ["tests.conftest"]
# Programs that they start find the proofs' own parts, `proofs.x.test_y.Part`, too.
ENVIRONMENT["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
