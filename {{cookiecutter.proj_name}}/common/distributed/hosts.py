"""Slurm's compact lists of host names, for nodes without `scontrol`."""

import re
from itertools import product

from common.base.errors import UserError


def expand_hosts(text: str) -> list[str]:
    """The names in a list such as "rack[1-2]n[03-04],login", in Slurm's order: rack1n03, rack1n04, rack2n03, ...

    Raises:
        UserError: the list cannot be read.
    """
    hosts: list[str] = []
    for entry in _split(text):
        # Text and brackets in turn: "rack[1-2]n[03-04]" -> "rack", "1-2", "n", "03-04", "".
        parts = re.split(r"\[([^\[\]]*)\]", entry)
        if any(mark in part for part in parts[::2] for mark in "[]") or not entry:
            raise _unreadable(text)
        choices = [[part] if index % 2 == 0 else _numbers(part, text) for index, part in enumerate(parts)]
        hosts += ["".join(combination) for combination in product(*choices)]
    return hosts


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    return [entry.strip() for entry in re.split(r",(?![^\[]*\])", text.strip())]


def _numbers(ranges: str, text: str) -> list[str]:
    """ "001-003,7" -> 001, 002, 003, 7: as wide as the first of each range is written."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _unreadable(text)
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(text: str) -> UserError:
    return UserError(f"Slurm's list of nodes cannot be read: {text!r}; set MASTER_ADDR to the first one's name")
