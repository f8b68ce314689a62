"""How a program begins and ends: its config; what parts and tools do around it, in their `around.py` and `explain.py`.

The config may be that of an earlier run, which `--resume` or `--model_pt` names by its folder or a checkpoint.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn

from common.base.errors import UserError
from common.base.files import PROJECT
from common.config import option_value, resolve, section
from common.distributed import is_launched
from common.failure.program import exit_process, report_errors
from common.run.paths import RunPaths
from common.run.record import read_attempts
from custom.config import Config


@section
class EvalConfig(Config):
    """The settings of `evaluate.py`: a training config, and which checkpoint to evaluate on which split."""

    model_pt: str | None = None
    """checkpoint, or the folder of a run: its best; required"""
    split: Literal["train", "val", "eval"] = "eval"
    """split to evaluate on"""


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Call the `main` of a program, which returns the exit code, and end this process."""
    with report_errors(), entered("explain"):
        exit_process(main(sys.argv[1:]))


def entered(name: str, *arguments: Any) -> AbstractContextManager[Any]:
    """Return the contexts that all files of this name return, in one.

    `around(run, trainer)` may not change what is trained; `explain()` adds notes to an error.
    """
    stack = ExitStack()
    for folder in ("parts", "tools"):
        for file in sorted(PROJECT.glob(f"{folder}/*/{name}.py")):
            module = import_module(f"{folder}.{file.parent.name}.{name}")
            stack.enter_context(getattr(module, name)(*arguments))
    return stack


def with_config_of_run(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the config of the run that `--resume` names, if `argv` has no `--config`.

    The run then continues in that folder, whatever its config says, unless `argv` names another.
    """
    words = list(argv)
    if option_value(argv, "--config"):
        return words
    resume = option_value(argv, "--resume")
    stored = config_of_run(resume)
    if stored is None:
        if resume and resume != "auto" and not Path(resume).expanduser().exists():
            raise UserError(f"--resume {resume}: there is no such run or checkpoint")
        return words
    if not any(word.startswith("--allow_changes") for word in words):  # it was allowed once
        words += ["--allow_changes", "false"]
    if is_launched(option_value(argv, "--dist.launcher")):
        words = with_default_launch(words)
    if not option_value(argv, "--name"):
        config = resolve(Config, [stored], words).config
        root = RunPaths.for_run(config.dir, config.name, PROJECT).root
        if root.resolve() != stored.parent.resolve() or "--debug" in argv:  # which has a name of its own
            words += ["--name", stored.parent.name]
            if not option_value(argv, "--dir.runs_dir"):
                words += ["--dir.runs_dir", str(stored.parent.parent)]
    return [*words, "--config", str(stored)]


def config_of_run(resume: str | None) -> Path | None:
    """Return the config file of the last start of the run that `--resume` names; None if it names none."""
    if not resume or resume == "auto":  # the run that the config names, and the config is not known yet
        return None
    path = Path(resume).expanduser()
    if path.is_dir():
        path = path / "latest.pt"  # any name: of_checkpoint looks only at the folder
    folder = RunPaths.of_checkpoint(path)
    file = folder.config_file
    attempts = read_attempts(folder)
    if attempts:
        file = folder.root / attempts[-1]["config"]
    if not file.is_file():
        return None
    return file


def with_default_launch(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the default launch options, instead of those that a run was started with."""
    words = list(argv)
    for name, value in {"--dist.processes": "null", "--dist.launcher": "auto"}.items():
        if option_value(argv, name) is None:
            words += [name, value]
    return words
