"""The server of an exported model, without the web: what it answers, and which files it refuses to read.

The template's tests ask a running server.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from common.base.errors import UserError
from examples.serving import server

DATASET = {"type": "ImageFiles", "size": [2, 2], "channels": 1}


class Brightness(nn.Module):
    """Two classes: dark and bright."""

    def forward(self, image: Tensor) -> Tensor:
        bright = image.flatten(1).mean(dim=1)
        return torch.stack([-bright, bright], dim=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An exported model with its description, as tools.export writes them."""
    path = tmp_path / "model.pt2"
    example = (torch.rand(2, 1, 2, 2),)
    torch.export.save(torch.export.export(Brightness(), example, dynamic_shapes=[{0: torch.export.Dim("batch")}]), path)
    about = {
        "format": "torch", "dataset": DATASET, "classes": ["dark", "bright"], "sha256": "0", "step": 1,
        "inputs": {"image": {"key": "image", "dtype": "float32"}}, "outputs": {"output": {}},
    }  # fmt: skip
    path.with_name("model.pt2.json").write_text(json.dumps(about))
    return path


@pytest.fixture
def ask(model: Path) -> Iterator[Any]:
    """ask(bytes): the answer of the model."""
    about, limit = server.describe(model), Image.MAX_IMAGE_PIXELS
    run = server.load(model, about)
    server.limit_images(server.MAX_PIXELS)
    yield lambda data: server.answer(run, about, data)
    Image.MAX_IMAGE_PIXELS = limit


def picture(size: tuple[int, int] = (8, 8), form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("L", size, 255).save(file, form)
    return file.getvalue()


def test_an_image_is_prepared_and_named(ask: Any) -> None:
    found = ask(picture())
    assert (found["prediction"], found["class"], list(found["top"])) == (1, "bright", ["bright", "dark"])
    assert found["probability"] == pytest.approx(float(torch.tensor([-1.0, 1.0]).softmax(0)[1]))


def test_malicious_files_are_not_decoded(ask: Any) -> None:
    """Too many pixels in a small file; a format that would start a program; a path in place of an image."""
    with pytest.raises(UserError, match=r"Image size \(25005000 pixels\) exceeds limit"):
        ask(picture((5000, 5001)))
    with pytest.raises(UserError, match="it is not in one of the formats BMP, GIF"):
        ask(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    for data in (b"/etc/passwd", picture()[:-30], b""):
        with pytest.raises(UserError):
            ask(data)


def test_what_cannot_be_served(model: Path) -> None:
    with pytest.raises(UserError, match=r"there is no nothing.onnx; export a model first"):
        server.describe(Path("nothing.onnx"))
    file = model.with_name("model.pt2.json")
    about = json.loads(file.read_text())
    file.write_text(json.dumps({**about, "inputs": {"noise": {"key": None}}}))
    with pytest.raises(UserError, match="the task computes noise, so a file alone is not enough"):
        server.describe(model)
    with pytest.raises(UserError, match=r"served are files that tools.export writes with --to onnx or torch"):
        server.load(model, {**about, "format": "aoti"})
    with pytest.raises(UserError, match="the server needs no-such-package, not installed here: python -m pip install"):
        server.need("no-such-package")
