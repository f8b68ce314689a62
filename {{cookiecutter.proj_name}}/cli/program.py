"""How a program begins and ends; what parts and tools do around it, in files called `around.py` and `explain.py`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from common.base.files import PROJECT
from common.failure.program import exit_process, report_errors

if TYPE_CHECKING:
    from common.run_context import RunContext
    from common.trainer import Trainer


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Call the `main` of a program, which returns the exit code, and end this process."""
    with report_errors(), explained():
        exit_process(main(sys.argv[1:]))


@contextmanager
def around(run: "RunContext", trainer: "Trainer") -> Iterator[None]:
    """Enter `around(run, trainer)` of each; none of them may change what is trained."""
    with entered("around", run, trainer):
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Enter `explain()` of each, which adds notes to an error."""
    with entered("explain"):
        yield


def entered(name: str, *arguments: Any) -> AbstractContextManager[Any]:
    """Return the contexts of all files of this name, in one."""
    stack = ExitStack()
    for folder in ("parts", "tools"):
        for file in sorted(PROJECT.glob(f"{folder}/*/{name}.py")):
            module = import_module(f"{folder}.{file.parent.name}.{name}")
            stack.enter_context(getattr(module, name)(*arguments))
    return stack
