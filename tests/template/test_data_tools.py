"""What docs/data_tools.md shows, done to the letter in a rendered project, with the real packages of its recipes."""

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from real import REPORT
from support import HERE, fresh, python_with
from warm import warm_python

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+/\S+\.(?:py|yaml))\n")
# A few steps are enough.
SHORT = ["--progress.max_steps", "3", "--batch_size", "8", "--monitor.writers", "[]", "--num_workers", "1"]
# The wheel of torchvision on PyPI is for CUDA; without it, its compiled part is not loaded, and its import fails for
# the names of two operators, which nothing here calls.
SHIM = """
import importlib.metadata
try:
    import torch
    if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
"""
# Makes what the recipes would download.
MAKE = """
import datasets, numpy as np, transformers
from PIL import Image
pictures = [Image.fromarray(np.full((8, 8), 25 * (at % 10), np.uint8)) for at in range(40)]
data = datasets.Dataset.from_dict({"image": pictures, "label": [at % 10 for at in range(40)]})
datasets.DatasetDict(train=data, test=data).save_to_disk("data/hub")
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
open("vocab.txt", "w").write("\\n".join(words))
tokenizer = transformers.BertTokenizer("vocab.txt") if not hasattr(transformers, "BertTokenizerFast") else \\
    transformers.BertTokenizerFast(vocab={word: at for at, word in enumerate(words)})
tokenizer.save_pretrained("data/bert")
config = transformers.BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=16, num_labels=2)
transformers.BertForSequenceClassification(config).save_pretrained("data/bert")
"""


@contextmanager
def ported(factory: pytest.TempPathFactory, wanted: str, *packages: str) -> Iterator[Path]:
    """A Python that has the packages of a list, and all that this one has.

    Some take five seconds to import: programs are forked from a process that has them.
    """
    shim = factory.mktemp("shim")
    (shim / "sitecustomize.py").write_text(SHIM)
    own = str(python_with(HERE / f"{wanted}.txt", factory))
    with warm_python(own, *packages, servers=1, PYTHONPATH=str(shim), HF_HUB_OFFLINE="1") as programs:
        yield programs / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ported(tmp_path_factory, "recipes", "datasets", "timm", "torchvision", "transformers") as python:
        yield python


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Path:
    """A rendered project with every file that the page shows, and small data of every kind."""
    home = tmp_path_factory.mktemp("home")
    settings = home / "config.yaml"
    settings.write_text(f"cookiecutters_dir: {home}/c\nreplay_dir: {home}/r\n")
    root = fresh(tmp_path_factory.mktemp("out"), settings)
    for page in (
        "docs/data_tools.md",
        "docs/images.md",
        "docs/parts/transforms.md",
        "docs/mixing.md",
        "docs/tools/pack.md",
        "README.md",
    ):
        for _, text in BLOCK.findall((root / page).read_text()):
            if named := FILE.match(text):
                (root / named[1]).write_text(text)
    random = np.random.default_rng(0)
    for part, count in (("photos", 12), ("photos/train", 6), ("photos/val", 6)):
        for label in ("cat", "dog", "emu"):
            for number in range(count):
                path = root / "data" / ("split" if "/" in part else "") / part / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(random.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(path)
    raw = root / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train", "t10k"):
        images, labels = random.integers(0, 256, (40, 28, 28), dtype=np.uint8), np.arange(40, dtype=np.uint8) % 10
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 40, 28, 28) + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 40) + labels.tobytes())
    (root / "data" / "reviews").mkdir()
    for name in ("train", "test"):
        (root / "data" / "reviews" / f"{name}.tsv").write_text("1\ta good film\n0\ta bad bad film\n" * 20)
    call(root, python, "-c", MAKE)
    return root


def call(root: Path, python: Path, *words: str) -> str:
    """Run a program in the project to its end; what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), *words], cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


CONFIGS = ["combined", "transformed", "mnist", "resnet", "timm", "hub", "text"]
SHOWN = {
    "mnist": "MNIST",
    "resnet": "resnet18",
    "timm": "timm.create_model",
    "hub": "load_from_disk",
    "text": "TextTask",
}


FEW = [pytest.param(name, marks=() if name in ("combined", "text") else pytest.mark.full) for name in CONFIGS]


@pytest.mark.parametrize("name", FEW)
def test_a_config_of_the_page_trains_and_resumes(project: Path, python: Path, name: str) -> None:
    config = f"configs/{name}.yaml"
    said = call(project, python, "train.py", "--config", config, *SHORT)
    assert "finished at" in said
    assert "val " in said
    longer = [word if word != "3" else "5" for word in SHORT]
    assert "this resume is bit-exact" in call(
        project, python, "train.py", "--config", config, "--resume", "auto", *longer
    )
    if name in SHOWN:
        assert SHOWN[name] in (project / "experiments" / name / "config.yaml").read_text() + said
        REPORT.append(f"docs/data_tools.md: {name}")


def test_weight_decay_of_a_model_of_timm(project: Path, python: Path) -> None:
    """optim.no_decay: auto takes its own list, in which a token does not exist."""
    model = "{type: timm.create_model, model_name: vit_tiny_patch16_224, img_size: 64, num_classes: 3}"
    words = ["--model", model, "--optim.weight_decay", "0.1", "--optim.no_decay", "auto", "--name", "vit"]
    call(project, python, "train.py", "--config", "configs/timm.yaml", *words, *SHORT)
    read = """
import torch
state = torch.load("experiments/vit/checkpoints/latest.pt", weights_only=True)
groups = {group["name"]: group["param_names"] for group in state["optimizer"]["param_groups"]}
assert "patch_embed.proj.weight" in groups["all"], groups
assert {"pos_embed", "cls_token", "norm.weight"} < set(groups["all.no_decay"]), groups
"""
    call(project, python, "-c", read)
    REPORT.append("timm's no_weight_decay")


def test_the_pretrained_backbone(project: Path, python: Path) -> None:
    """Its weights come from a file here: the head keeps its own, the frozen layers do not change."""
    make = "import torch, torchvision; torch.save(torchvision.models.resnet18().state_dict(), 'resnet18.pth')"
    call(project, python, "-c", make)
    words = ["--config", "configs/pretrained.yaml", "--init_from.path", "resnet18.pth", *SHORT]
    assert "120 of 122" in call(project, python, "train.py", *words)
    REPORT.append("pretrained")


def test_shards_are_packed_and_trained_on(project: Path, python: Path) -> None:
    page = (project / "docs" / "tools" / "pack.md").read_text()
    lines = [line for _, text in BLOCK.findall(page) for line in text.splitlines() if "tools.pack" in line]
    assert len(lines) == 2
    for line in lines:
        call(project, python, *line.replace("data/photos/", "data/split/photos/").split()[1:])
    assert "finished at" in call(project, python, "train.py", "--config", "configs/shards.yaml", *SHORT)


def test_the_mixed_batches_of_the_page(project: Path, python: Path) -> None:
    page = (project / "docs" / "mixing.md").read_text()
    for collate in re.findall(r'--loader.collate "(.*)"', page):
        words = ["train.py", "--config", "configs/default.yaml", "--loader.collate", collate, *SHORT]
        assert "finished at" in call(project, python, *words)
        stored = yaml.safe_load((project / "experiments" / "default" / "config.yaml").read_text())
        assert stored["loader"]["collate"] == yaml.safe_load(collate)


def test_the_transform_of_the_page(project: Path, python: Path) -> None:
    words = ["train.py", "--config", "configs/default.yaml", "--dataset.train.transforms", "[{type: noise}]", *SHORT]
    assert "finished at" in call(project, python, *words)
    assert "custom/datasets/noise_transform.py" in call(project, python, "train.py", "--list", "transform")
