"""Renders a project, trains it on the CPU, evaluates its best checkpoint, and shows where the results are.

    python tools/demo.py FOLDER [--KEY VALUE ...]

FOLDER is made anew every time; one that this script did not make is left alone. Keys go to the training:
--progress.max_steps 2 shows that everything works on a machine, and learns nothing.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).resolve().parent.parent
PROJECT = "my_project"
RUN = Path("experiments/default")
MARK = ".made_by_make_demo"


def main(folder: Path, keys: list[str]) -> None:
    project = render(folder)
    print(f"   cd {project}", flush=True)
    run(project, "train.py", "--config", "configs/default.yaml", "--gpu_ids", "-1", *keys)
    run(project, "evaluate.py", "--model_pt", str(RUN / "checkpoints/best.pt"))
    show_results(project)


def render(folder: Path) -> Path:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            sys.exit(f"{folder} holds something that `make demo` did not make; name another: make demo DEMO_DIR=...")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    print(f"== render a project\n   cookiecutter {TEMPLATE} --no-input -o {folder} proj_name={PROJECT}", flush=True)
    # The user's own cookiecutter settings would give a different project on every machine.
    return Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=str(folder), default_config=True))


def run(project: Path, *arguments: str) -> None:
    """Run one command of a normal user, and show it as that user would type it."""
    print(f"\n== {shlex.join(['python', *arguments])}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = subprocess.run([sys.executable, *arguments], cwd=project, env=environment).returncode
    if code:
        sys.exit(code)


def show_results(project: Path) -> None:
    run_folder = project / RUN
    evaluation = run_folder / "eval" / "best"
    measured = json.loads((evaluation / "metrics.json").read_text())
    tensorboard = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(project / "experiments")])
    print(f"\n== results on {measured['samples']} test images that training never saw")
    values, last = measured["values"], ""
    for name, value in values.items():
        # A single loss equals the sum, which comes before it.
        if last != "loss" or value != values["loss"]:
            print(f"   {name:<17} {value:.4f}")
        last = name
    print(f"   log               {run_folder / 'train.log'}")
    print(f"   pictures          {evaluation}")
    print(f"   curves            {tensorboard}\n                     and look at http://localhost:6006")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
