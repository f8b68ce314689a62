"""Predict for files: python predict.py --model_pt experiments/default --input FILES|FOLDER [--gpu_ids 0 ...]"""

import argparse
import inspect
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from common.base.errors import UserError, error_context
from common.base.files import atomic_file, output_file, unused_path
from common.base.parts import required
from common.base.text import plain
from common.config.arguments import fit_arguments
from common.config.problem import join_names, shown_path
from common.config.registry import DATASET_REGISTRY
from common.data.keyed import find_collate
from common.data.loader import EvaluationLoader
from common.data.sections import OWN, apply_transforms
from common.monitor.log import logger, setup_log
from common.monitor.result import Picture
from common.run.paths import RunPaths
from common.task import Task
from cli.trained import load_trained
from library.data.files_below import files_below

_PRINTED = 20  # with more files, predictions are only written
_SHOWN = 20  # files named in a message


class Line(str):
    """A line of a text file, a sample of its own. `file` is the name of the file, a colon and the line's number."""

    file: str


class Predicted(NamedTuple):
    """A batch: a row for each file that was read, with its picture if wanted, and why others cannot be read."""

    rows: list[dict[str, Any]]
    pictures: list[Picture]
    unreadable: list[str]


class Predictor:
    """A trained task for files: `Predictor("experiments/default")(["a.png"])` gives a dict for each.

    Args:
        model_pt: a checkpoint, or the folder of a run, whose best one is used.
        options: settings that differ from the run's, as on the command line: "--gpu_ids", "0".
    """

    def __init__(self, model_pt: str | Path, *options: str) -> None:
        self.trained = load_trained(model_pt, options)

    def __call__(self, inputs: Iterable[str | Path]) -> list[dict[str, Any]]:
        """Return a row for each file; of a folder for all below it.

        Raises `UserError` that counts unreadable files, and names some of them.
        """
        files = find_files(inputs, self.trained.section()[1])
        rows, unreadable = list[dict[str, Any]](), list[str]()
        for batch in self.run(files):
            rows += batch.rows
            unreadable += batch.unreadable
        if unreadable:
            raise UserError(f"{len(unreadable)} of {len(files)} files cannot be read: {join_names(unreadable, _SHOWN)}")
        return rows

    def run(self, files: list[str], *, pictures: bool = False) -> Iterator[Predicted]:
        """Predict batch by batch."""
        loader = self.loader(files)
        for (batch, reasons), (_, indices) in zip(loader, loader.keys, strict=True):
            names = [heading(files[index])["file"] for index in indices]
            unreadable = [why if names[at] in why else f"{names[at]}: {why}" for at, why in reasons.items()]
            good = [files[index] for at, index in enumerate(indices) if at not in reasons]
            rows, drawn = self.predict(batch, good, pictures) if good else ([], [])
            yield Predicted(rows, drawn, unreadable)

    def loader(self, files: Sequence[Any]) -> EvaluationLoader:
        """Batches of files in their order, see `Samples`: prepared as the data of the run, read by its workers."""
        trained, (split, section) = self.trained, self.trained.section()
        config, dataset = trained.config, build_files(section, split, files)
        samples = Samples(dataset, find_collate(dataset, config.loader.collate))
        size, loader = section.get("eval_batch_size", config.batch_size), replace(config.loader, collate=None)
        return EvaluationLoader(
            samples, loader, batch_size=size, worker=config.num_workers, rank=trained.rank, seed=trained.seed
        )

    @torch.no_grad()
    def predict(self, batch: Any, files: list[str], pictures: bool) -> tuple[list[dict[str, Any]], list[Picture]]:
        """Return the rows and pictures of a loaded batch."""
        task, precision = self.trained.task, self.trained.precision
        batch = task.prepare_batch(precision.cast_batch(batch), self.trained.rank.device)
        with precision.autocast():
            output = task.output(batch)
        output = task.post_process(output, batch)
        rows = describe(task, output, batch)
        if len(rows) != len(files):
            raise UserError(f"{type(task).__name__}.describe gives {len(rows)} rows for {len(files)} samples")
        named = [{**heading(file), **row} for file, row in zip(files, rows, strict=True)]
        with error_context(lambda: f"in {type(task).__name__}.pictures: the batches of predict.py have no labels"):
            return named, task.pictures(output, batch, len(files)) if pictures else []


def describe(task: Task, output: Any, batch: Any) -> list[dict[str, Any]]:
    """Describe the predictions for a batch after `post_process`: for each sample, plain values by name.

    The task's own method `describe` says what; else, the tensors of the output with up to 16 numbers per sample.

    Raises:
        UserError: the output has no such tensors, so the task needs the method.
    """
    own = getattr(task, "describe", None)
    if own is not None:
        rows: list[dict[str, Any]] = own(output, batch)
        return rows
    named = {"output": output}
    if isinstance(output, Mapping):
        named = dict(output)
    size = 0  # of the batch: as the first tensor says
    columns: dict[str, list[Any]] = {}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        size = size or len(value)
        if len(value) != size:
            continue
        if value.numel() == size:
            columns[name] = value.flatten().tolist()
        elif value.numel() <= 16 * size:
            columns[name] = value.tolist()
    if not columns:
        kind = type(task).__name__
        raise UserError(f"{kind} needs a method describe(output, batch) that returns a dict for each sample")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class Samples:
    """The samples of files, where one that cannot be read neither ends a worker nor spoils a batch.

    A batch is a collated one, None if it is empty; and of the samples that cannot be read the position in it, and why.
    """

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.inner = dataset, collate
        self.random = getattr(dataset, "random", True)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:  # noqa: BLE001 - a user's dataset can raise anything
            return _Unreadable(error if isinstance(error, UserError) else f"{type(error).__name__}: {error}")

    def collate(self, samples: list[Any]) -> tuple[Any, dict[int, str]]:
        good = [sample for sample in samples if not isinstance(sample, _Unreadable)]
        broken = {at: str(sample) for at, sample in enumerate(samples) if isinstance(sample, _Unreadable)}
        return (self.inner(good) if good else None), broken


class _Unreadable(str):
    """Why a sample cannot be read."""


def sections_to_reader(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sections of datasets inside each other, from this one to the first whose class reads files."""
    if callable(getattr(DATASET_REGISTRY.get(section["type"]), "from_files", None)):
        return [section]
    inner = section.get("set")
    sets = section.get("sets")
    if isinstance(sets, list) and sets:
        inner = sets[0]
    return [section, *sections_to_reader(inner)] if isinstance(inner, Mapping) else [section]


def build_files(section: Mapping[str, Any], mode: str, files: Sequence[Any]) -> Any:
    """Build a dataset of these files, without labels, prepared as the samples of a section are.

    The class of the dataset makes it: `from_files(files, **arguments)`, where the arguments are the section's, and the
    defaults of the class. Sample i is that of file i.

    Raises:
        UserError: the class has no `from_files`.
    """
    *outer, section = sections_to_reader(section)
    kind = DATASET_REGISTRY.get(section["type"])
    make = getattr(kind, "from_files", None)
    if not callable(make):
        raise UserError(
            f"dataset.{mode}: {section['type']} cannot read single files; give the class a method from_files, "
            f'or name another dataset: --dataset.{mode} "{{type: ImageFiles, size: [32, 32]}}"'
        )
    given = {name: value for name, value in section.items() if name not in ("type", "transforms", *OWN)}
    defaults = {parameter.name: parameter.default for parameter in inspect.signature(kind).parameters.values()}
    defaults = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    dataset = make(files, **defaults | fit_arguments(kind, given))
    for each in [section, *reversed(outer)]:
        dataset = apply_transforms(dataset, each, mode)
    return dataset


def find_files(inputs: Iterable[str | Path], section: Mapping[str, Any]) -> list[str]:
    """List the files to predict: those named, and in each folder those that the section's dataset can read.

    Files of a folder are in the order of their names; hidden ones are skipped. For a dataset with `lines = True`, it
    is all lines of these files that are not blank, and `-` is the standard input.

    Raises:
        UserError: one does not exist, or there is none.
    """
    reader = DATASET_REGISTRY.get(sections_to_reader(section)[-1]["type"])
    names = [str(Path(path)) for path in inputs]
    suffixes, of_lines = getattr(reader, "suffixes", None), getattr(reader, "lines", False)
    if missing := [name for name in names if not (Path(name).exists() or (of_lines and name == "-"))]:
        raise UserError(f"--input: there is no file or folder {join_names(missing)}")

    def files_of(path: Path) -> list[str]:
        return [str(file) for file in files_below(path) if suffixes is None or file.suffix.lower() in suffixes]

    paths = (files_of(Path(name)) if Path(name).is_dir() else [name] for name in names)
    files = list(dict.fromkeys(itertools.chain(*paths)))
    samples: list[str] = [line for file in files for line in _lines(file)] if of_lines else files
    if not samples:
        kind = "line" if of_lines else "file"
        raise UserError(f"--input: no {kind} that {section['type']} can read in {', '.join(names)}")
    return samples


def _lines(file: str) -> Iterator[Line]:
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline=None)
    except UnicodeDecodeError as error:
        raise UserError(f"--input: {file} is not text in UTF-8: {error}") from error
    for number, words in enumerate(text, 1):
        if words.strip():
            line = Line(words.rstrip("\n"))
            line.file = f"{file}:{number}"
            yield line


def heading(file: str) -> dict[str, str]:
    """Return what a row begins with: the file, or a line's file, number and text."""
    return {"file": file.file, "text": str(file)} if isinstance(file, Line) else {"file": file}


def rows_as_text(rows: list[dict[str, Any]]) -> bytes:
    """Return the rows as lines of JSON."""
    lines = [f"{json.dumps(plain(row), ensure_ascii=False)}\n" for row in rows]
    return "".join(lines).encode(errors="backslashreplace")


def brief(row: Mapping[str, Any]) -> str:
    """Return a row on a line of the terminal, without lists and dicts."""
    short = {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
    return "  ".join(str(value) if key == "file" else f"{key} {value}" for key, value in short.items())


def main(argv: list[str]) -> int:
    """Predict for all files, and write predictions and pictures. Returns the exit code: 1 if a file cannot be read."""
    setup_log()
    parser = argparse.ArgumentParser("predict.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_pt", required=True, help="checkpoint, or the folder of a run: its best one")
    parser.add_argument("--input", required=True, nargs="+", help="files, folders to search; of texts: lines, or -")
    parser.add_argument("--out", type=Path, help="folder to write to; by default <run>/predict, or predict-2, ...")
    is_true: dict[str, Any] = {"nargs": "?", "const": True, "default": False, "type": lambda word: word == "true"}
    parser.add_argument("--pictures", **is_true, metavar="true", help="draw a picture for each file")
    options, settings = parser.parse_known_args(argv)  # all others are settings, as of evaluate.py
    drawing: Any = required("pictures", "draw", "--pictures") if options.pictures else None
    predictor = Predictor(options.model_pt, *settings)
    files = find_files(options.input, predictor.trained.section()[1])
    folder = options.out or unused_path(RunPaths.of_checkpoint(predictor.trained.path).root / "predict")
    target, skipped, done = folder / "predictions.jsonl", list[str](), 0
    if target.exists():
        raise UserError(f"--out {folder} has {target.name} already; name another folder, or delete that file")
    with output_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as file, tqdm(total=len(files), unit="file", disable=None) as bar:
            for batch in predictor.run(files, pictures=options.pictures):
                file.write(rows_as_text(batch.rows))
                for number, (row, picture) in enumerate(zip(batch.rows, batch.pictures, strict=False), done):
                    stem = os.fsencode(Path(row["file"]).stem)[:150].decode(errors="ignore")  # a name has 255 bytes
                    drawing.save_png(folder / "pictures" / f"{number:06}_{stem}.png", drawing.draw(picture))
                skipped, done = skipped + batch.unreadable, done + len(batch.rows)
                if len(files) <= _PRINTED:
                    print(*map(brief, batch.rows), sep="\n")
                bar.update(len(batch.rows) + len(batch.unreadable))
    if skipped:
        logger.error("{} of {} files cannot be read: {}", len(skipped), len(files), join_names(skipped, _SHOWN))
    logger.info("{} predicted by {}: {}", done, shown_path(predictor.trained.path), shown_path(target))
    return int(bool(skipped))
