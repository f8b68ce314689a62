"""Show the keys that differ between two configs, and where each value was written: python -m tools.diff A B

A and B are config files, folders of runs, or checkpoints.
"""

from pathlib import Path

from common.base.errors import UserError
from common.checkpoint.fingerprint import changes
from common.config import Resolved, dump, resolve
from common.config.problem import DEFAULT
from cli.program import run
from cli.stored_config import stored_config
from custom.config import Config


def main(argv: list[str]) -> int:
    """Print each key with both values and their origins. Returns the exit code."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    if len(argv) != 2 or argv[0].startswith("-"):
        raise UserError("usage: python -m tools.diff A B; each is a config file, the folder of a run, or a checkpoint")
    first, second = map(read, argv)
    changed = list(changes(first.values, second.values))
    for change in changed:
        print(change.key)
        for value, origins in ((change.old, first.origins), (change.new, second.origins)):
            print(f"  {dump(value, flow=True)}  # {origins.get(change.key, DEFAULT)}")
    print(f"{len(changed)} keys differ" if changed else "no key differs")
    return 0


def read(path: str) -> Resolved[Config]:
    """Read the whole config of a file or of a run's last start. Raises `UserError`."""
    is_config = Path(path).suffix in (".yaml", ".yml")
    file = Path(path) if is_config else stored_config(["--resume", path], "--resume")
    if file is None:
        raise UserError(f"{path} is neither a config file nor the folder of a run nor one of its checkpoints")
    return resolve(Config, [file])


if __name__ == "__main__":
    run(main)
