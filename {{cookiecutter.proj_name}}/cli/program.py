"""How a program begins and ends: with the words of its command line, and its exit code or the reason for an error."""

import sys
from collections.abc import Callable
from typing import NoReturn

from common.failure.program import exit_process, report_errors
from cli.advice import explain_errors


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Call the `main` of a program, which returns the exit code, and end this process."""
    with report_errors(), explain_errors():
        exit_process(main(sys.argv[1:]))
