"""Predict for files: python predict.py --model_pt experiments/default --input FILES|FOLDER [--gpu_ids 0 ...]"""

import argparse
import inspect
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from common.base.errors import UserError
from common.base.files import atomic_file, unused_path
from common.base.parts import fill, required
from common.base.text import label, plain
from common.config.arguments import fit_arguments
from common.config.problem import join_names, shown_path
from common.config.registry import DATASET_REGISTRY
from common.data.keyed import find_collate, make_batch
from common.data.loader import EvaluationLoader
from common.data.sections import OWN, sets_of
from common.monitor.log import logger, setup_log
from common.monitor.result import Picture
from common.run.paths import RunPaths
from common.task import Task
from cli.trained import Trained, load_trained
from library.data.files_below import files_below

_TOP = 5  # classes in a row
_SHOWN = 20  # with more files, predictions are only written; files named in a message


class Line(str):
    """A line of a text file, a sample of its own. `file` is the name of the file, a colon and the line's number."""

    file: str


class Predicted(NamedTuple):
    """A batch: a row for each sample that was read, with its picture if wanted, and why others could not be."""

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
        """Return a row for each file; of a folder for all below it. A file that is named twice has one row.

        Raises `UserError` that counts the files without a prediction, and names some of them.
        """
        files = self.find_files(inputs)
        rows = []
        unreadable = []
        for batch in self.run(files):
            rows += batch.rows
            unreadable += batch.unreadable
        if unreadable:
            reasons = join_names(unreadable, _SHOWN)
            raise UserError(f"{len(unreadable)} of {len(files)} files have no prediction: {reasons}")
        return rows

    def find_files(self, inputs: Iterable[str | Path]) -> list[str]:
        """List the files to predict: those named, and in each folder those that the run's dataset can read.

        Files of a folder are in the order of their names; hidden ones are skipped. For a dataset with `lines = True`,
        it is all lines of these files that are not blank.

        Raises:
            UserError: one does not exist, or there is none.
        """
        kind = preparing_set(self.trained)[1]["type"]
        reader = DATASET_REGISTRY.get(kind)
        suffixes = getattr(reader, "suffixes", None)
        files: dict[str, None] = {}  # each once
        for path in map(Path, inputs):
            if not path.exists():
                raise UserError(f"--input: there is no file or folder {path}")
            if not path.is_dir():
                files[str(path)] = None
                continue
            for file in files_below(path):
                if suffixes is None or file.suffix.lower() in suffixes:
                    files[str(file)] = None
        samples = list(files)
        if getattr(reader, "lines", False):
            samples = [line for file in files for line in _lines(file)]
        if not samples:
            raise UserError(f"--input: nothing that {kind} can read in {', '.join(map(str, inputs))}")
        return samples

    def run(self, files: list[str], *, pictures: bool = False) -> Iterator[Predicted]:
        """Predict batch by batch. Raises `UserError` if the run's dataset cannot read single files."""
        return self._batches(self.loader(files), files, pictures)

    def _batches(self, loader: EvaluationLoader, files: list[str], pictures: bool) -> Iterator[Predicted]:
        for (batch, reasons), (_, indices) in zip(loader, loader.keys, strict=True):
            good = []
            unreadable = []
            for at, index in enumerate(indices):
                if at in reasons:
                    unreadable.append(f"{heading(files[index])['file']}: {reasons[at]}")
                else:
                    good.append(files[index])
            if good:
                yield Predicted(*self.predict(batch, good, pictures), unreadable)
            else:
                yield Predicted([], [], unreadable)

    def loader(self, files: Sequence[Any]) -> EvaluationLoader:
        """Batches of files in their order, see `Samples`: prepared as the data of the run, read by its workers."""
        trained = self.trained
        split, section = preparing_set(trained)
        config = trained.config
        dataset = build_files(section, split, files)
        return EvaluationLoader(
            Samples(dataset, find_collate(dataset, config.loader.collate)),
            replace(config.loader, collate=None),
            batch_size=section.get("eval_batch_size", config.batch_size),
            worker=config.num_workers,
            rank=trained.rank,
            seed=trained.config.dist.random_seed,
        )

    @torch.no_grad()
    def predict(self, batch: Any, files: list[str], pictures: bool) -> tuple[list[dict[str, Any]], list[Picture]]:
        """Return the rows and pictures of a loaded batch."""
        task = self.trained.task
        precision = self.trained.precision
        batch = task.prepare_batch(precision.cast_batch(batch), self.trained.rank.device)
        with precision.autocast():
            output = task.output(batch)
        output = task.post_process(output, batch)
        rows = describe(task, output, batch)
        named = [{**heading(file), **row} for file, row in zip(files, rows, strict=True)]
        if not pictures:
            return named, []
        drawing = required("pictures", "classification", "--pictures")
        return named, drawing.pictures(task, output, batch, len(files))


def preparing_set(trained: Trained) -> tuple[str, Mapping[str, Any]]:
    """Return the name and section of the dataset that defines how to prepare inputs: the first of eval, or of val.

    Raises:
        UserError: both are null. Training data are augmented, so they cannot be used instead.
    """
    for split in ("eval", "val"):
        for name, section in sets_of(getattr(trained.config.dataset, split)).items():
            return label(split, name), section
    raise UserError(
        "dataset.eval and dataset.val are null in the config of this run, so nothing says how inputs are prepared; "
        'name a dataset: --dataset.eval "{type: ImageFiles, size: [HEIGHT, WIDTH]}"'
    )


def describe(task: Task, output: Any, batch: Any) -> list[dict[str, Any]]:
    """Describe the predictions for a batch after `post_process`: for each sample, plain values by name.

    The task's own method `describe` says what; else, the most likely classes if the output has `probabilities`
    (B, classes) and `prediction` (B,), or the tensors of the output with up to 16 numbers per sample.

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
    probabilities = named.get("probabilities")
    prediction = named.get("prediction")
    if getattr(probabilities, "ndim", 0) == 2 and getattr(prediction, "ndim", 0) == 1:
        return likeliest(named["probabilities"], named["prediction"].long(), task.classes)
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


def likeliest(probabilities: Tensor, prediction: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return `prediction`, its `class` name, its `probability` and the `top` classes of every sample.

    A class without a name has its number. Of a prediction that is no class, such as -1, the probability is None.

    Args:
        probabilities: (B, classes).
        prediction: (B,), the task's choice; it need not be the likeliest.
    """
    names = {number: str(number) for number in range(probabilities.shape[1])} | dict(enumerate(classes))
    rows = []
    best = probabilities.topk(min(_TOP, probabilities.shape[1]), dim=1).indices
    for values, number, others in zip(probabilities.tolist(), prediction.tolist(), best.tolist(), strict=True):
        probability = None
        if 0 <= number < len(values):
            probability = round(values[number], 6)
        top = {names[other]: round(values[other], 6) for other in others}
        name = names.get(number, str(number))
        rows.append({"prediction": number, "class": name, "probability": probability, "top": top})
    return rows


class Samples:
    """The samples of files, where one that cannot be read neither ends a worker nor spoils a batch.

    A batch is a collated one, None if it is empty; and of the samples that cannot be read the position in it, and why.
    """

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset = dataset
        self.inner = collate
        self.random = getattr(dataset, "random", True)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except UserError as error:
            return _Unreadable(error)
        except Exception as error:  # noqa: BLE001 - a user's dataset can raise anything
            return _Unreadable(f"{type(error).__name__}: {error}")

    def collate(self, samples: list[Any]) -> tuple[Any, dict[int, str]]:
        good = []
        broken = {}
        for at, sample in enumerate(samples):
            if isinstance(sample, _Unreadable):
                broken[at] = str(sample)
            else:
                good.append(sample)
        if not good:
            return None, broken
        return make_batch(self.inner, good, self.dataset), broken


class _Unreadable(str):
    """Why a sample cannot be read."""


def build_files(section: Mapping[str, Any], mode: str, files: Sequence[Any]) -> Any:
    """Build a dataset of these files, without labels, prepared as the samples of a section are.

    The class of the dataset makes it: `from_files(files, **arguments)`, where the arguments are the section's, and the
    defaults of the class. Sample i is that of file i.

    Raises:
        UserError: the class has no `from_files`.
    """
    kind = DATASET_REGISTRY.get(section["type"])
    make = getattr(kind, "from_files", None)
    if not callable(make):
        raise UserError(
            f"dataset.{mode}: {section['type']} cannot read single files; give the class a method from_files, "
            f'or name another dataset: --dataset.{mode} "{{type: ImageFiles, size: [HEIGHT, WIDTH]}}"'
        )
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.default is not parameter.empty:
            arguments[name] = parameter.default
    given = {name: value for name, value in section.items() if name not in ("type", "transforms", *OWN)}
    dataset = make(files, **arguments | fit_arguments(kind, given))
    return fill("transforms", "steps", dataset, dataset, section, mode)


def _lines(file: str) -> Iterator[Line]:
    try:
        text = io.StringIO(Path(file).read_bytes().decode("utf-8-sig"), newline=None)
    except UnicodeDecodeError as error:
        raise UserError(f"--input: {file} is not text in UTF-8: {error}") from error
    for number, words in enumerate(text, 1):
        if words.strip():
            line = Line(words.rstrip("\n"))
            line.file = f"{file}:{number}"
            yield line


def heading(file: str) -> dict[str, str]:
    """Return what a row begins with: the file, or a line's file, number and text."""
    if isinstance(file, Line):
        return {"file": file.file, "text": str(file)}
    return {"file": file}


def main(argv: list[str]) -> int:
    """Predict for all files, and write predictions and pictures. Returns the exit code: 1 if one has no prediction."""
    setup_log()
    parser = argparse.ArgumentParser("predict.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_pt", required=True, help="checkpoint, or the folder of a run: its best one")
    parser.add_argument("--input", required=True, nargs="+", help="files, and folders to search; of texts, each line")
    parser.add_argument("--out", type=Path, help="folder to write to; by default <run>/predict, or predict-2, ...")
    parser.add_argument("--pictures", action="store_true", help="draw a picture for each file")
    options, settings = parser.parse_known_args(argv)  # all others are settings, as of evaluate.py
    drawing: Any = None
    if options.pictures:
        drawing = required("pictures", "draw", "--pictures")
    predictor = Predictor(options.model_pt, *settings)
    files = predictor.find_files(options.input)
    folder = options.out or unused_path(RunPaths.of_checkpoint(predictor.trained.path).root / "predict")
    target = folder / "predictions.jsonl"
    if target.exists():
        raise UserError(f"--out {folder} has {target.name} already; name another folder, or delete that file")
    done = 0
    skipped = []
    batches = predictor.run(files, pictures=options.pictures)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as file, tqdm(total=len(files), unit="file", disable=None) as bar:
        for batch in batches:
            for row in batch.rows:
                line = json.dumps(plain(row), ensure_ascii=False).encode(errors="backslashreplace")
                file.write(line + b"\n")
                if len(files) <= _SHOWN:
                    print(line.decode())
            for number, picture in enumerate(batch.pictures):
                stem = os.fsencode(Path(batch.rows[number]["file"]).stem)[:150]  # a name has 255 bytes
                name = f"{done + number:06}_{stem.decode(errors='ignore')}.png"
                drawing.save_png(folder / "pictures" / name, drawing.draw(picture))
            done += len(batch.rows)
            skipped += batch.unreadable
            bar.update(len(batch.rows) + len(batch.unreadable))
    if skipped:
        logger.error("{} of {} files have no prediction: {}", len(skipped), len(files), join_names(skipped, _SHOWN))
    logger.info("{} predicted by {}: {}", done, shown_path(predictor.trained.path), shown_path(target))
    return int(bool(skipped))
