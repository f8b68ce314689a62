"""The pictures of a report, inside the page: the latest of each kind, no more and no larger than it can carry."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from common.run.paths import RunPaths
from support.read import RunFiles
from support.report.page import Html, joined, tag

_MOST_BYTES = 300_000  # of a picture: larger ones are stored as JPEG
_MOST_PIXELS = 1400  # of the longer side


def pictures(run: RunFiles, most: int = 16, *, progress: bool = True) -> Html:
    """The latest pictures of the evaluations, and of each split's progress, at most so many of each."""
    parts = []
    for heading, files in _latest(RunPaths(run.path), progress):
        shown = [_picture(file) for file in files[:most]]
        if any(shown):
            more = f", the first {most} of {len(files)}" if len(files) > most else ""
            parts += [tag("h3", heading, more), tag("ul", *shown, class_="pictures")]
    return joined(parts)


def _latest(paths: RunPaths, progress: bool) -> Iterator[tuple[str, list[Path]]]:
    """Headings and files. Pictures of the evaluation's progress are those of the eval folder again."""
    evaluations = [folder for folder in _folders(paths.eval) if any(folder.rglob("*.png"))]
    if evaluations:
        folder = max(evaluations, key=lambda each: (each.stat().st_mtime, each.name))
        yield f"eval/{folder.name}", sorted(folder.rglob("*.png"))
    for split in _folders(paths.progress) if progress else []:
        if split.name == "eval" and evaluations:
            continue
        newest: dict[Path, Path] = {}
        for file in sorted(split.rglob("*.png")):  # the steps of a folder are in order
            newest[file.parent] = file
        if newest:
            yield (
                f"progress/{split.name}, {max(newest.values(), key=lambda f: f.stem).stem.replace('_', ', ')}",
                list(newest.values()),
            )


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _picture(file: Path) -> Html:
    """A picture and its name; empty if it cannot be read."""
    try:
        data, kind = file.read_bytes(), "png"
        with Image.open(io.BytesIO(data)) as image:
            if len(data) > _MOST_BYTES or max(image.size) > _MOST_PIXELS:
                image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
                buffer = io.BytesIO()
                image.convert("RGB").save(buffer, "JPEG", quality=85)
                data, kind = buffer.getvalue(), "jpeg"
            width, height = image.size
    except (OSError, ValueError):
        return Html("")
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    name = file.parent.name if re.fullmatch(r"epoch\d+_step\d+", file.stem) else file.stem
    return tag("li", tag("img", src=source, alt=name, width=width, height=height), name, style=f"width: {width}px")
