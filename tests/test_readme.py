"""The recipes of the project's README and of its docs work."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image

from support import TEMPLATE, fresh

RECIPE = re.compile(r"^```python\n# in ClassificationTask.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOGS_ONE_MORE = """
import torch
from torch import Tensor
from common.evaluation.loss import LossFactory, Losses, LossSums
from common.distributed import Rank
from common.evaluation.metric import MetricFactory
from common.monitor.meter import Meter
from custom.tasks.classification_task import ClassificationTask
import custom.loss  # fills the registry

class Task(ClassificationTask):
{method}
output, batch = dict(logits=torch.tensor([[3.0, 4.0], [0.0, 0.0]])), dict(label=torch.tensor([0, 1]))
loss, metric = LossFactory(dict(CrossEntropyLoss=dict(weight=1.0))), MetricFactory(dict())
losses = Task(torch.nn.Identity(), loss, metric).losses(output, batch)
assert losses["loss"] == losses["CrossEntropyLoss"]
meter, sums = Meter(), LossSums()
meter.add(1, losses, 2)
sums.add(losses, 2, 2)
assert meter.read().raw["logit_norm"] == sums.means(Rank())[0]["logit_norm"] == 2.5
"""
BLOCK = re.compile(r"^```(?:yaml|python)\n(# (\S+/\S+\.(?:py|yaml))\n.*?)^```$", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADER = re.compile(
    r"# configs/(\w+)\.yaml\n# yaml-language-server: \$schema=schema\.json\n\$BASE: \w+\.yaml.*\nname: (\w+)"
)
PAGES = ["README.md", *(path.relative_to(TEMPLATE).as_posix() for path in sorted(TEMPLATE.glob("docs/*.md")))]
# They need torchvision, MLflow and wandb: see test_data_tools.py, which also has those of docs/data_tools.md, and
# test_trackers.py.
ELSEWHERE = {"pretrained", "trackers"}
SHORT = ["--progress.max_steps", "3", "--monitor.writers", "[]"]
FEW_SAMPLES = ["--debug.max_samples", "64", *SHORT[2:]]  # for stages, which end after some epochs
SCHEMA_CHECK = """
import sys
from pathlib import Path
from common.config.source import plain, read_file
from tests.tools.test_schema import SCHEMA, broken
for name in sys.argv[1:]:
    wrong = broken(plain(read_file(Path(name))), SCHEMA)
    assert not wrong, f"{name}: {wrong}"
"""


@pytest.mark.parametrize("page", PAGES)
def test_every_config_of_a_page_is_complete(page: str) -> None:
    """With the name of its file, the schema for editors, its base, and the name of the run; a file of another kind has
    a name outside configs/."""
    for text in YAML.findall((TEMPLATE / page).read_text(encoding="utf-8")):
        if re.match(r"# (?!configs/)\S+\.yaml\n", text):
            continue
        found = HEADER.match(text)
        assert found, f"{page}:\n{text}"
        assert page == "docs/config.md" or found[1] == found[2], f"{page}: {found[1]}"


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_every_link_of_a_page_leads_to_a_file(page: str) -> None:
    """And to a heading, where it names one."""
    text = (TEMPLATE / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, heading = unquote(link).partition("#")
        target = (TEMPLATE / page).parent / file if file else TEMPLATE / page
        assert target.exists(), f"{page}: {link}"
        if heading:
            headings = re.findall(r"^(?:{%.*?%})?#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert heading in slugs, f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_the_python_files_of_a_page_pass_the_linter(page: str, tmp_path: Path) -> None:
    """With the project's rules, so that `make lint` passes for those who copy them."""
    shown = [(tmp_path / path, text) for text, path in blocks(TEMPLATE / page) if path.endswith(".py")]
    for file, text in shown:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for command in (["check"], ["format", "--check"]) if shown else ():
        rules = ["--no-cache", "--config", str(TEMPLATE / "pyproject.toml")]
        call(TEMPLATE, "-m", "ruff", *command, *rules, str(tmp_path))


@pytest.mark.slow
def test_every_config_of_the_pages_trains(tmp_path: Path) -> None:
    """In a fresh project with all files that the pages show; three steps each."""
    project = fresh(tmp_path, settings(tmp_path))
    shown = {path: text for page in PAGES if page != "docs/data_tools.md" for text, path in blocks(project / page)}
    for path, text in shown.items():
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text(text, encoding="utf-8")
    for number, label in enumerate(("cat", "dog", "horse") * 8):
        image = project / "data" / "photos" / label / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (10 * number, 0, 0)).save(image)
    rows = "".join(f"{n % 7},{n % 5},{n % 3},{n % 7 + n % 5}\n" for n in range(40))
    (project / "data" / "table.csv").write_text(f"a,b,c,value\n{rows}")
    configs = [path for path in shown if path.endswith(".yaml")]
    assert len(configs) > 10
    call(project, "-m", "tools.schema")
    call(project, "-c", SCHEMA_CHECK, *configs)
    call(project, "train.py", "--config", "configs/default.yaml", *SHORT)  # finetune.yaml begins with its weights
    for path in (path for path in configs if Path(path).stem not in ELSEWHERE):
        assert "finished at" in call(
            project, "train.py", "--config", path, *(FEW_SAMPLES if "stages" in path else SHORT)
        )


def blocks(page: Path) -> list[tuple[str, str]]:
    """Text and path of each file that a page shows."""
    return [(found[1], found[2]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def settings(folder: Path) -> Path:
    file = folder / "cookiecutter.yaml"
    file.write_text(f"cookiecutters_dir: {folder}/c\nreplay_dir: {folder}/r\n")
    return file


def call(project: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def test_one_more_value_is_logged_as_the_readme_says() -> None:
    """In training and in evaluation, without being minimised."""
    method = RECIPE.search((TEMPLATE / "README.md").read_text(encoding="utf-8"))
    assert method
    program = LOGS_ONE_MORE.replace("{method}", method[1])
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TEMPLATE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
