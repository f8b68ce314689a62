"""Files given by hand: which ones, their samples, those that cannot be read, and what is predicted for them."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.text import plain
from common.data.from_files import build_files, reader_of
from common.data.keyed import find_collate
from common.data.loader import EvaluationLoader
from support.trained import Trained

Batch = tuple[Any, dict[int, str]]
"""A collated batch, None if it is empty; and of the samples that cannot be read the position in it, and the reason."""
_SHOWN = 100  # files named in a message


class Line(str):
    """A line of a text file, a sample of its own. `file` is the name of the file, a colon and the line's number."""

    file: str


def find_files(inputs: Iterable[str | Path], section: Mapping[str, Any]) -> list[str]:
    """The files that are meant: those named, and in each folder those that the data set of the section can read.

    Files of a folder are in the order of their names; hidden ones are left out. For a data set with `lines = True`, it
    is all lines of these files that are not blank, and `-` is the standard input.

    Raises:
        UserError: one does not exist, or there is none.
    """
    reader = reader_of(section)
    suffixes, of_lines = getattr(reader, "suffixes", None), getattr(reader, "lines", False)
    found: dict[str, None] = {}
    missing = []
    for path in map(Path, inputs):
        if str(path) == "-" and of_lines:
            found["-"] = None
        elif path.is_dir():
            inside = (each for each in sorted(path.rglob("*")) if each.is_file())
            shown = (each for each in inside if not any(part[0] == "." for part in each.relative_to(path).parts))
            found |= dict.fromkeys(str(each) for each in shown if suffixes is None or each.suffix.lower() in suffixes)
        elif path.is_file():
            found[str(path)] = None
        else:
            missing.append(str(path))
    if missing:
        raise UserError(f"--input: there is no file or folder {listed(missing)}")
    samples: list[str] = [line for file in found for line in _lines(file)] if of_lines else list(found)
    if not samples:
        kind, places = "line" if of_lines else "file", ", ".join(map(str, inputs))
        raise UserError(f"--input: no {kind} that {section['type']} can read in {places}")
    return samples


def _lines(file: str) -> Iterator[Line]:
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline=None)
    except UnicodeDecodeError as error:
        raise UserError(f"--input: {file} is not text in UTF-8: {error}") from error
    for number, line in enumerate(text, 1):
        if line.strip():
            each = Line(line.rstrip("\n"))
            each.file = f"{file}:{number}"
            yield each


def heading(file: str) -> dict[str, str]:
    """What a row begins with: the file, or a line's file, number and text."""
    return {"file": file.file, "text": str(file)} if isinstance(file, Line) else {"file": file}


def listed(names: Sequence[str]) -> str:
    """The names, one per line if there are several; the first hundred of very many."""
    more = [f"... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return names[0] if len(names) == 1 else "".join(f"\n  {name}" for name in (*names[:_SHOWN], *more))


class Samples:
    """The samples of files, where one that cannot be read neither ends a worker nor spoils a batch."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.inner = dataset, collate
        self.random = getattr(dataset, "random", True)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except UserError as error:
            return _Unreadable(str(error))
        except Exception as error:  # noqa: BLE001 - a user's data set can raise anything
            return _Unreadable(f"{type(error).__name__}: {error}")

    def collate(self, samples: list[Any]) -> Batch:
        good = [sample for sample in samples if not isinstance(sample, _Unreadable)]
        broken = {at: str(each) for at, each in enumerate(samples) if isinstance(each, _Unreadable)}
        return (self.inner(good) if good else None), broken


class _Unreadable(str):
    """Why a sample cannot be read."""


def file_loader(trained: Trained, files: Sequence[Any]) -> EvaluationLoader:
    """Batches of files in their order, see `Batch`: prepared as the data of the run, read by its workers."""
    split, section = trained.section()
    config, dataset = trained.config, build_files(section, split, files)
    samples = Samples(dataset, find_collate(dataset, config.loader.collate))
    return EvaluationLoader(
        samples,
        replace(config.loader, collate=None),
        batch_size=section.get("eval_batch_size", config.batch_size),
        worker=config.worker,
        rank=trained.rank,
        seed=trained.seed,
    )


def rows_as_text(rows: list[dict[str, Any]], form: str, *, header: bool) -> bytes:
    """Rows as lines of JSON or CSV, where lists and dicts are JSON too."""
    if form == "jsonl":
        return "".join(f"{json.dumps(plain(row), ensure_ascii=False)}\n" for row in rows).encode(
            errors="backslashreplace"
        )
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0] if rows else ())
    if header and rows:
        writer.writeheader()
    for row in plain(rows):
        writer.writerow(
            {key: json.dumps(each) if isinstance(each, (dict, list)) else each for key, each in row.items()}
        )
    return text.getvalue().encode(errors="backslashreplace")


def brief(row: Mapping[str, Any]) -> str:
    """A row on a line of the terminal, without lists and dicts."""
    return "  ".join(
        str(value) if key == "file" else f"{key} {value}"
        for key, value in row.items()
        if not isinstance(value, (dict, list))
    )
