"""Makes the picture at the top of both READMEs: the log of a run, its curves, and predictions.

    python tools/picture.py [FOLDER [--key value ...]]

Renders a project, trains its default config (or with the given keys) on the CPU, and writes the picture as an SVG to
FOLDER; without one, to docs/ here and in the project.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).resolve().parent.parent
NAME = "run.svg"
TRAIN = ["train.py", "--config", "configs/default.yaml", "--gpu_ids", "-1"]
BEST = "experiments/default/checkpoints/best.pt"
# Run in the project: the label and the probabilities of each test image, which training never saw.
PREDICT = f"""
import json, sys, numpy, torch
from common.checkpoint.file import read_checkpoint
from custom.build import MODEL_REGISTRY
state = read_checkpoint(__import__("pathlib").Path("{BEST}"))
model = MODEL_REGISTRY.build(state["about"]["config"]["model"])
model.load_state_dict(state["model"])
data = numpy.load("data/digits.npz")
images, labels = (data[name][data["split"] == 2] for name in ("images", "labels"))
found = model.eval()(torch.from_numpy(images).float()[:, None] / 16).softmax(1)
json.dump([images.tolist(), labels.tolist(), found.tolist()], sys.stdout)
"""

Record = dict[str, Any]
Image = list[list[int]]
Line = list[tuple[float, float]]

WIDTH, PAD, GAP = 1000, 16, 14  # pixels
LOG_HEIGHT, PANEL_HEIGHT = 262, 216
COLUMNS = 108  # of the log
INK, BLUE, ORANGE, GREEN, RED = "#24292f", "#0969da", "#bc4c00", "#2da44e", "#cf222e"


def main(arguments: Sequence[str]) -> None:
    folders = (
        [Path(arguments[0])] if arguments else [TEMPLATE / "docs", TEMPLATE / "{{cookiecutter.proj_name}}" / "docs"]
    )
    with tempfile.TemporaryDirectory() as temporary:
        rendered = cookiecutter(str(TEMPLATE), no_input=True, output_dir=temporary, default_config=True)
        project = Path(rendered)
        log = run(project, *TRAIN, *arguments[1:]).replace(f"{project}/", "")
        records = (project / "experiments" / "default" / "metrics.jsonl").read_text().splitlines()
        text = picture(log, [json.loads(record) for record in records], *json.loads(run(project, "-c", PREDICT)))
    for folder in folders:
        (folder / NAME).write_text(text, encoding="utf-8")
        print(f"wrote {folder / NAME} ({len(text) // 1000} kB)")


def run(project: Path, *words: str) -> str:
    """The output of a Python command in the project, as a terminal of `COLUMNS` would show it."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, *words], cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout + done.stderr if words[0] != "-c" else done.stdout


def picture(log: str, records: list[Record], images: list[Image], labels: list[int], found: list[list[float]]) -> str:
    """The SVG. `records`: of metrics.jsonl; `images` (N, 8, 8), 0 to 16; `found`: probabilities (N, 10)."""
    height = LOG_HEIGHT + PANEL_HEIGHT + GAP
    top, width = LOG_HEIGHT + GAP, (WIDTH - 2 * GAP) / 3
    losses = {name: curve(records, name, "loss") for name in ("train", "val")}
    accuracies = {name: curve(records, name, "Accuracy") for name in ("val", "eval")}
    right = sum(max(range(10), key=row.__getitem__) == label for row, label in zip(found, labels, strict=True))
    body = [
        *terminal(excerpt(log)),
        *chart(0, top, width, "loss", losses, scale_to=0.0),
        *chart(width + GAP, top, width, "accuracy", accuracies, scale_to=1.0),
        *mosaic(2 * (width + GAP), top, width, images, labels, found, f"{right} of {len(labels)} test images right"),
    ]
    style = f"text {{ font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: {INK} }}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    title = "<title>Log, curves and predictions of the default run</title>"
    return "\n".join([head, title, f"<style>{style}</style>", *body, "</svg>"]) + "\n"


def excerpt(log: str) -> list[str]:
    """A few lines of the log: what is trained, how it begins, how it ends. Without the place in the code, if shown."""
    lines = [re.sub(r"^(\S+ \w+) +\w[\w/]*\.py:\d+ +", r"\1  ", line) for line in log.splitlines()]
    lines = [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 2]} …" for line in lines]
    chosen = ("model ", "train data ", "val data ")
    first = [line for line in lines if re.sub(r"^\S+ \w+ +", "", line).startswith(chosen)][:3]
    train, val, evaluation = ([line for line in lines if re.search(rf"\b{word}\b", line)] for word in (
        r"epoch +\d+/\d+", "val +epoch", "eval +epoch"))  # fmt: skip
    end = [line for line in lines if "best validation" in line or "to evaluate" in line]
    shown = [*first, *val[:1], *train[:1], "...", *train[-1:], *val[-1:], *evaluation[-1:], *end]
    return [f"$ python {' '.join(TRAIN[:3])}", *dict.fromkeys(shown)]


def curve(records: list[Record], event: str, value: str) -> Line:
    found = [(record["step"], record["values"].get(value)) for record in records if record["event"] == event]
    return [(step, number) for step, number in found if number is not None]


def terminal(lines: Sequence[str]) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{LOG_HEIGHT}" rx="8" fill="#0d1117"/>'
    for at, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        yield f'<circle cx="{PAD + 6 + 18 * at}" cy="17" r="5.5" fill="{colour}"/>'
    for at, line in enumerate(lines):
        colour = "#7ee787" if line.startswith("$") or "best" in line else "#c9d1d9"
        place = f'x="{PAD}" y="{48 + 18 * at}" font-size="14" xml:space="preserve"'
        yield f'<text {place} style="fill: {colour}" textLength="{8.9 * len(line):.0f}">{escape(line)}</text>'


def panel(x: float, y: float, width: float, title: str) -> str:
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{PANEL_HEIGHT}" rx="8" fill="#fff" stroke="#d0d7de"/>'
    return f'{box}<text x="{x + 14:.1f}" y="{y + 21}" font-size="13" font-weight="bold">{title}</text>'


def chart(x: float, y: float, width: float, title: str, lines: dict[str, Line], scale_to: float) -> Iterator[str]:
    """Curves over the steps, on a scale that includes `scale_to`."""
    both = [point for line in lines.values() for point in line]
    last = max((step for step, _ in both), default=1) or 1
    low, high = (pick([value for _, value in both] + [scale_to]) for pick in (min, max))
    left, right, top, bottom = x + 46, x + width - 12, y + 34, y + PANEL_HEIGHT - 28

    def at(step: float, value: float) -> str:
        across, up = step / last, (value - low) / (high - low or 1)
        return f"{left + across * (right - left):.1f},{bottom - up * (bottom - top):.1f}"

    yield panel(x, y, width, title)
    for tick in (low, (low + high) / 2, high):
        level = at(0, tick).split(",")[1]
        yield f'<path d="M{left} {level}H{right}" stroke="#eaeef2"/>'
        yield f'<text x="{left - 6}" y="{float(level) + 4}" font-size="11" text-anchor="end">{tick:.2f}</text>'
    yield f'<text x="{right}" y="{bottom + 18}" font-size="11" text-anchor="end">step {last}</text>'
    for number, ((name, line), colour) in enumerate(zip(lines.items(), (BLUE, ORANGE), strict=True)):
        points = " ".join(at(*point) for point in line)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        place = f'x="{right - 56 * (1 - number)}" y="{y + 21}" font-size="12" text-anchor="end"'
        yield f'<text {place} style="fill: {colour}">{name}</text>'


def mosaic(
    x: float, y: float, width: float, images: list[Image], labels: list[int], found: list[list[float]], title: str
) -> Iterator[str]:
    """For each digit, the three test images of which the model is least sure, each with its answer."""
    yield panel(x, y, width, title)
    cell = (width - 24) / 10
    for digit in range(10):
        own = sorted((at for at, label in enumerate(labels) if label == digit), key=lambda at: found[at][digit])
        for row, at in enumerate(own[:3]):
            answer = max(range(10), key=found[at].__getitem__)
            left, top = x + 12 + digit * cell, y + 34 + row * 58
            yield digit_cell(left, top, cell - 4, images[at], GREEN if answer == digit else RED)
            place = f'x="{left + (cell - 4) / 2:.1f}" y="{top + cell + 13:.1f}" font-size="10" text-anchor="middle"'
            colour = INK if answer == digit else RED
            yield f'<text {place} style="fill: {colour}">{answer} {round(100 * found[at][answer])}</text>'


def digit_cell(x: float, y: float, size: float, image: Image, frame: str) -> str:
    """Pixels as runs of equal shade, in four shades."""
    shades: dict[int, str] = {}
    for row, pixels in enumerate(image):
        for column, value in enumerate(pixels):
            if shade := round(value / 4):
                shades[shade] = shades.get(shade, "") + f"M{column} {row}h1v1h-1z"
    ink = "".join(f'<path d="{path}" fill-opacity="{shade / 4}"/>' for shade, path in sorted(shades.items()))
    box = f'<rect x="-.4" y="-.4" width="8.8" height="8.8" fill="#fff" stroke="{frame}" stroke-width=".6"/>'
    return f'<g transform="translate({x:.1f} {y:.1f}) scale({size / 8:.3f})" fill="{INK}">{box}{ink}</g>'


if __name__ == "__main__":
    main(sys.argv[1:])
