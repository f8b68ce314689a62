"""Makes the two pictures of the READMEs from what the commands in them really print.

    python tools/picture.py [FOLDER]

Renders a project, makes mistakes in it, trains it, kills it and resumes it, all on the CPU. `mistakes.svg` shows how
mistakes are explained; `run.svg` a run that was killed and resumed. Both are written to FOLDER; without one, to docs/
here and in the project.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap

from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).resolve().parent.parent
TRAIN = "python train.py --config configs/default.yaml"
THREE = f"{TRAIN} --optim.lrr 0.01 --model.width wide --batch_size 0"
MODEL = """import torch
from torch import nn

from common.config.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class MyModel(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(32, 100), nn.ReLU(), nn.Linear(100, classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)
"""
SAME = "python -m tools.same experiments/default experiments/uncut"
WIDTH, PAD, LINE = 860, 18, 18  # pixels
COLUMNS = 100  # of a terminal, as the log fits it where there is none
LETTER = (WIDTH - 2 * PAD) / COLUMNS
STYLE = """
text { font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: 13.5px; fill: #c9d1d9 }
text.prompt { fill: #fff; font-weight: bold } text.best { fill: #7ee787 } text.bad { fill: #ffa198 }
text.dim { fill: #8b949e }
"""


def main(arguments: Sequence[str]) -> None:
    project_docs = TEMPLATE / "{{cookiecutter.proj_name}}" / "docs"
    folders = [Path(arguments[0])] if arguments else [TEMPLATE / "docs", project_docs]
    with tempfile.TemporaryDirectory() as temporary:
        options = {"no_input": True, "output_dir": temporary, "default_config": True}
        project = Path(cookiecutter(str(TEMPLATE), extra_context={"parts": "all"}, **options))
        pictures = {"mistakes.svg": mistakes(project), "run.svg": killed(project)}
    for folder in folders:
        for name, text in pictures.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"wrote {folder / name} ({len(text) // 1000} kB)")


def mistakes(project: Path) -> str:
    """Three mistakes in the config, and one in a model."""
    (project / "custom" / "models" / "my_model.py").write_text(MODEL, encoding="utf-8")
    command = f"{TRAIN} --model.type MyModel"
    box = run(project, command)
    box = box[max(at for at, line in enumerate(box) if line.startswith("=") and " failed " in line) :]
    top, first = terminal(0, [f"$ {THREE}", *run(project, THREE)])
    bottom, second = terminal(top + 14, [f"$ {command}", *box])
    return svg("Mistakes are explained: three in a config, and one in a model", bottom, [*first, *second])


def killed(project: Path) -> str:
    """Return a run that is killed and resumed, and another one that is not."""
    (project / "custom" / "models" / "my_model.py").unlink()
    first = kill(project, TRAIN)
    resumed, whole = run(project, f"{TRAIN} --resume auto"), run(project, f"{TRAIN} --name uncut")
    lines = [
        f"$ {TRAIN}", *first,
        f"$ {TRAIN} --resume auto", *find(resumed, "resuming ", "this resume "), "...", *last_lines(resumed),
        f"$ {TRAIN} --name uncut", "...", *last_lines(whole),
        f"$ {SAME}", *run(project, SAME),
    ]  # fmt: skip
    bottom, shown = terminal(0, lines)
    return svg("A run that was killed and resumed, with the same results", bottom, shown)


def environment() -> dict[str, str]:
    """As on a machine with nothing else to do: one thread, whatever runs beside this."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def run(project: Path, command: str) -> list[str]:
    """Return the lines that a command in the project prints, without the folder that it happens to be in."""
    options = {"cwd": project, "env": environment(), "shell": True, "text": True}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options)  # type: ignore[call-overload]
    return done.stdout.replace(f"{project}/", "").splitlines()  # type: ignore[no-any-return]


def kill(project: Path, command: str) -> list[str]:
    """Start a training, and kill it in its tenth epoch. Its first and last lines, and what the shell says."""
    log = project / "experiments" / "default" / "train.log"
    with (project / "killed.txt").open("w+") as output:
        shell = subprocess.Popen(
            ["bash", "-c", f"{command} & echo $! > pid; wait $!"],
            cwd=project, env=environment(), stdout=output, stderr=output,
        )  # fmt: skip
        while not (log.exists() and re.search(r"val +10/", log.read_text())):
            time.sleep(0.02)
            assert shell.poll() is None, "the training ended before it could be killed"
        time.sleep(0.1)
        command = f"kill -9 {(project / 'pid').read_text().strip()}"
        subprocess.run(command, shell=True, check=True)
        shell.wait()
        output.seek(0)
        lines = output.read().replace(f"{project}/", "").splitlines()
    (project / "pid").unlink()
    trained = [line for line in lines if re.match(r"\S+ INFO +(epoch|val) +\d", line)]
    said = re.sub(r"^bash: line \d+: +\d+ ", "", lines[-1])
    return [*find(lines, "model ", "train data"), *trained[:2], "...", *trained[-2:], f"$ {command}", said]


def find(lines: Sequence[str], *beginnings: str) -> list[str]:
    """Return the lines of a log whose texts begin so."""
    return [line for line in lines if re.sub(r"^\S+ [A-Z]+ +", "", line).startswith(beginnings)]


def last_lines(lines: Sequence[str]) -> list[str]:
    """Return the last validation and evaluation of a log, and the best result in its summary."""
    return [find(lines, "val ")[-1], find(lines, "eval ")[-1], *(line for line in lines if line.startswith("  best "))]


def terminal(y: float, lines: Sequence[str]) -> tuple[float, list[str]]:
    """Return a terminal from `y` on; its lower end, and the elements."""
    shown = list[tuple[str, str]]()
    for line in lines:
        kind = "prompt" if line.startswith("$") else "dim" if line == "..." else ""
        kind = kind or ("best" if "| best" in line or line.startswith("  best ") else "")
        kind = kind or ("bad" if line.startswith(("error", "=", "Killed")) else "")
        indent = " " * (len(line) - len(line.lstrip()) + (4 if kind == "prompt" else 2))
        pieces = wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, drop_whitespace=True)
        pieces = pieces if len(line) > COLUMNS else [line]
        shown += [(kind, piece) for piece in pieces]
    height = 30 + LINE * len(shown) + 14
    parts = [f'<rect y="{y}" width="{WIDTH}" height="{height}" rx="8" fill="#0d1117"/>']
    for at, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        parts.append(f'<circle cx="{PAD + 5 + 18 * at}" cy="{y + 15}" r="5" fill="{colour}"/>')
    for at, (kind, piece) in enumerate(shown):
        start = len(piece) - len(piece.lstrip())
        place = f'x="{PAD + start * LETTER:.1f}" y="{y + 42 + LINE * at}"'
        length = f'textLength="{LETTER * len(piece.strip()):.1f}"'
        parts.append(f'<text class="{kind}" {place} {length} xml:space="preserve">{escape(piece.strip())}</text>')
    return y + height, parts


def svg(title: str, height: float, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
