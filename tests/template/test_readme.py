"""The recipes of the project's README and of its docs work."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

from support import REPO, TEMPLATE, Render

RECIPE = re.compile(r"^```python\n# in ClassificationTask.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOGS_ONE_MORE = """
import torch
from torch import Tensor
from common.evaluation.loss import LossFactory, Losses, LossSums
from common.distributed import Rank
from common.evaluation.metric import MetricFactory
from common.monitor.meter import Meter
from common.progress import Position
from custom.tasks.classification_task import ClassificationTask
import custom.loss  # fills the registry

class Task(ClassificationTask):
{method}
output, batch = dict(logits=torch.tensor([[3.0, 4.0], [0.0, 0.0]])), dict(label=torch.tensor([0, 1]))
loss, metric = LossFactory(dict(CrossEntropyLoss=dict(weight=1.0))), MetricFactory(dict())
losses = Task(torch.nn.Identity(), loss, metric).losses(output, batch)
assert losses["loss"] == losses["CrossEntropyLoss"]
meter, sums = Meter(1, lambda found: [found]), LossSums()
meter.add(Position(), losses, 2)
sums.add(losses, 2, 2)
assert meter.read().raw["logit_norm"] == sums.means(Rank())[0]["logit_norm"] == 2.5
"""
BLOCK = re.compile(r"^```(?:yaml|python)\n(# (\S+/\S+\.(?:py|yaml))\n.*?)^```$", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"# configs/(\w+)\.yaml\n\$BASE: \w+\.yaml.*\nname: (\w+)")
FOUND = [*sorted(TEMPLATE.glob("docs/*.md")), *sorted(TEMPLATE.glob("docs/tools/*.md"))]
PAGES = ["README.md", *(path.relative_to(TEMPLATE).as_posix() for path in FOUND)]


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


@pytest.mark.parametrize("answers", [{}, {"examples": "all"}, {"parts": "core"}], ids=["template", "all", "core"])
def test_every_link_leads_to_a_file(render: Render, answers: dict[str, str]) -> None:
    """And to a heading, where it names one: in the template with the pages around it, and in what is rendered."""
    root = render(**answers) if answers else REPO
    pages = [path for path in root.rglob("*.md") if not any(part[0] == "." for part in path.relative_to(root).parts)]
    links = [(page, link) for page in pages for link in links_of(page.read_text(encoding="utf-8"))]
    assert len(links) > 40
    assert [f"{page.relative_to(root)}: {link}" for page, link in links if not leads_somewhere(page, link)] == []


def links_of(text: str) -> list[str]:
    """The targets of links and pictures outside of code, in Markdown and in HTML."""
    prose = re.sub(r"^( *)(```|~~~).*?^\1\2$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", prose)
    return [
        *inline,
        *re.findall(r"^\[[^]]+\]: (\S+)", prose, re.MULTILINE),
        *re.findall(r"(?:href|src)=\"([^\"]+)\"", prose),
    ]


def leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"https://|mailto:", link):
        return True
    path, _, heading = unquote(link).partition("#")
    target = page.parent / path if path else page
    if not heading:
        return target.exists()
    text = re.sub(r"^( *)```.*?^\1```$", "", target.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    anchors = set(re.findall(r"(?:id|name)=\"([^\"]+)\"", text))
    for title in re.findall(r"^(?:{%.*?%})?#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip()
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)  # as GitHub tells equal headings apart
        seen[slug] += 1
    return heading in anchors


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


@pytest.mark.parametrize("page", PAGES)
def test_what_the_python_files_of_a_page_import_needs_no_types(page: str) -> None:
    """`make lint` passes for those who copy them, without the package too: mypy does not ask for its types."""
    known = {path.stem for path in TEMPLATE.iterdir()} | set(sys.stdlib_module_names)
    known |= set(re.findall(r'"(\w+)\.\*"', (TEMPLATE / "pyproject.toml").read_text()))
    lists = "".join((TEMPLATE / f"requirements{end}.txt").read_text() for end in ("", "-dev"))
    known |= set(re.findall(r"^([\w-]+)[><=]", lists, re.MULTILINE))
    shown = "".join(text for text, path in blocks(TEMPLATE / page) if path.endswith(".py"))
    assert set(re.findall(r"^(?:import|from) (\w+)", shown, re.MULTILINE)) - known == set()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Text and path of each file that a page shows."""
    return [(found[1], found[2]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


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
