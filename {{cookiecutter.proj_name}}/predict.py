"""Predict for files: python predict.py --model_pt experiments/default --input FILES|FOLDER [--gpu_ids 0 ...]"""

import common  # noqa: F401  # isort: skip - first, since it says what is missing

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.base.context import error_context
from common.base.errors import UserError
from common.base.files import atomic_file
from common.config.problem import place
from common.failure.program import leave, reported
from common.monitor.log import logger, setup_log
from common.monitor.pictures import Picture, save_png
from common.run.paths import RunPaths
from cli.advice import explained
from support.files import brief, file_loader, find_files, heading, listed, rows_as_text
from support.trained import load_trained

_PRINTED = 20  # with more files, predictions are only written


@dataclass(frozen=True)
class Predicted:
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
        """A row for each file; of a folder for all below it. Raises `UserError` that names all unreadable files."""
        return [row for batch in self.run(find_files(inputs, self.trained.section()[1])) for row in batch.rows]

    def run(self, files: list[str], *, skip: bool = False, pictures: bool = False) -> Iterator[Predicted]:
        """Predict batch by batch. After a file that cannot be read, all others are only read, unless `skip` is set."""
        broken: list[str] = []
        loader = file_loader(self.trained, files)
        for (batch, reasons), (_, indices) in zip(loader, loader.keys, strict=True):
            names = [heading(files[index])["file"] for index in indices]
            unreadable = [why if names[at] in why else f"{names[at]}: {why}" for at, why in reasons.items()]
            broken += unreadable
            good = [files[index] for at, index in enumerate(indices) if at not in reasons]
            if skip or not broken:
                rows, drawn = self.predict(batch, good, pictures) if good else ([], [])
                yield Predicted(rows, drawn, unreadable)
        if broken and not skip:
            advice = "leave them out with --skip_unreadable, or repair or delete them"
            raise UserError(f"{len(broken)} of {len(files)} files cannot be read; {advice}: {listed(broken)}")

    @torch.no_grad()
    def predict(self, batch: Any, files: list[str], pictures: bool) -> tuple[list[dict[str, Any]], list[Picture]]:
        """The rows and pictures of a loaded batch."""
        task, precision = self.trained.task, self.trained.precision
        batch = task.prepare_batch(precision.cast_batch(batch), self.trained.rank.device)
        with precision.autocast():
            output = task.output(batch)
        output = task.post_process(output, batch)
        rows = task.describe(output, batch)
        if len(rows) != len(files):
            raise UserError(f"{type(task).__name__}.describe gives {len(rows)} rows for {len(files)} samples")
        named = [{**heading(file), **row} for file, row in zip(files, rows, strict=True)]
        with error_context(lambda: f"in {type(task).__name__}.pictures: the batches of predict.py have no labels"):
            return named, task.pictures(output, batch, len(files)) if pictures else []


def main(argv: list[str]) -> int:
    """Predict for all files, and write predictions and pictures. Returns the exit code."""
    setup_log()
    options, settings = command(argv)
    predictor = Predictor(options.model_pt, *settings)
    files = find_files(options.input, predictor.trained.section()[1])
    folder = output_folder(RunPaths.of_checkpoint(predictor.trained.path).root, options.out)
    target, skipped, done = folder / f"predictions.{options.format}", list[str](), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as file, tqdm(total=len(files), unit="file", disable=None) as bar:
            for batch in predictor.run(files, skip=options.skip_unreadable, pictures=options.pictures):
                file.write(rows_as_text(batch.rows, options.format, header=done == 0))
                for number, (row, picture) in enumerate(zip(batch.rows, batch.pictures, strict=False), done):
                    stem = os.fsencode(Path(row["file"]).stem)[:150].decode(errors="ignore")  # a name has 255 bytes
                    save_png(folder / "pictures" / f"{number:06}_{stem}.png", picture.image)
                skipped, done = skipped + batch.unreadable, done + len(batch.rows)
                if len(files) <= _PRINTED:
                    print(*map(brief, batch.rows), sep="\n")
                bar.update(len(batch.rows) + len(batch.unreadable))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}; choose another folder with --out") from error
    if skipped:
        logger.warning("{} of {} files cannot be read and are left out: {}", len(skipped), len(files), listed(skipped))
    many = "s" * (done != 1)
    logger.info("{} prediction{} of {}: {}", done, many, place(predictor.trained.path), place(target))
    return 0


def output_folder(run: Path, out: Path | None) -> Path:
    """Where to write: `out`, or the first of predict, predict_2, ... in the run's folder without predictions.

    Raises:
        UserError: `out` has predictions already.
    """
    if out is None:
        folders = (run / f"predict_{number}".removesuffix("_1") for number in itertools.count(1))
        return next(folder for folder in folders if not any(folder.glob("predictions.*")))
    for earlier in out.glob("predictions.*"):
        raise UserError(f"--out {out} has {earlier.name} already; name another folder, or delete that file")
    return out


def command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program; and all others, which are settings as of `evaluate.py`."""
    parser = argparse.ArgumentParser("predict.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_pt", required=True, help="checkpoint, or the folder of a run: its best one")
    parser.add_argument("--input", required=True, nargs="+", help="files, folders to search; of texts: lines, or -")
    parser.add_argument("--out", type=Path, help="folder to write to; by default <run>/predict, or predict_2, ...")
    parser.add_argument("--format", choices=["jsonl", "csv"], default="jsonl")
    flag: dict[str, Any] = {"nargs": "?", "const": True, "default": False, "type": lambda word: word == "true"}
    parser.add_argument("--pictures", **flag, metavar="true", help="draw a picture for each file")
    parser.add_argument("--skip_unreadable", **flag, metavar="true", help="leave out files that cannot be read")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    with reported(), explained():
        leave(main(sys.argv[1:]))
