"""tools.export and the example of a server in a render, with the real packages; its page is done literally."""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from real import REPORT
from support import fresh
from test_data_tools import BLOCK, call
from test_data_tools import python as python  # a Python with the packages of recipes.txt

pytestmark = pytest.mark.slow

RUN = "experiments/default"
SMALL = ["--config", "configs/default.yaml", "--progress.epoch", "3", "--model.width", "8", "--batch_size", "32"]
# Runs a sample of the page in the folder of the files, and compares it with the model itself.
USE = """
import os, sys
import numpy, torch
sys.path.insert(0, os.getcwd())
os.chdir("experiments/default/export")
from cli.trained import load_trained
images = torch.rand(5, 1, 8, 8)
trained = load_trained("../checkpoints/best.pt")
expected = trained.task.model(images).detach()
images = images.numpy() if {as_numpy} else images
{code}
print("difference", float((torch.as_tensor(logits) - expected).abs().max().detach()))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Path:
    """A rendered project with a short run, and pictures of digits."""
    home = tmp_path_factory.mktemp("home")
    settings = home / "config.yaml"
    settings.write_text(f"cookiecutters_dir: {home}/c\nreplay_dir: {home}/r\n")
    root = fresh(tmp_path_factory.mktemp("out"), settings, examples="all")
    with np.load(root / "data" / "digits.npz") as data:
        for number in range(3):
            Image.fromarray((data["images"][number] * 15).astype(np.uint8)).save(root / f"{number}.png")
    call(root, python, "train.py", *SMALL)
    return root


def exported(root: Path, python: Path, form: str, *words: str, run: str = RUN) -> str:
    return call(root, python, "-m", "tools.export", "--model_pt", run, "--to", form, *words)


def sample(root: Path, form: str) -> str:
    """Return the code of the page for one kind of file."""
    page = (root / "docs" / "tools" / "export.md").read_text()
    (found,) = [
        text for language, text in BLOCK.findall(page) if language == "python" and re.match(rf"# {form}\b", text)
    ]
    return str(found)


FORMS = {
    "torch": ("model.pt2", ""),
    "onnx": ("model.onnx", "import onnxruntime"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_gives_what_the_model_gives(project: Path, python: Path, form: str) -> None:
    """By the code of the page, for a batch size that no check has used; its description has all that is needed."""
    file, imports = FORMS[form]
    exported(project, python, form)
    about = json.loads((project / RUN / "export" / f"{file}.json").read_text())
    assert about["classes"] == list("0123456789")
    assert about["inputs"] == {"image": {"shape": ["batch", 1, 8, 8], "dtype": "float32", "key": "image"}}
    assert about["outputs"] == {"output": {"shape": ["batch", 10], "dtype": "float32"}}
    assert len(about["sha256"]) == 64
    use = USE.format(code=f"{imports}\n{sample(project, form)}", as_numpy=form == "onnx")
    assert float(call(project, python, "-c", use).split("difference")[1]) < 1e-5
    assert about["difference"] < 1e-5
    REPORT.append(f"tools.export --to {form}")


def test_a_wrong_program_gets_no_name(project: Path, python: Path) -> None:
    """With a tolerance that no program meets, and for a model whose output has mixed up samples."""
    command = [str(python), "-m", "tools.export", "--model_pt", RUN, "--to", "onnx", "--out", "out/model.onnx"]
    done = subprocess.run([*command, "--tolerance", "1e-12"], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "more than --tolerance 1e-12" in done.stderr
    assert list((project / "out").iterdir()) == []


def test_a_missing_package_is_named(project: Path, python: Path) -> None:
    """The command that installs it, instead of an import error."""
    (project / "without.py").write_text(
        "import sys, importlib.util as util\nfound = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name.startswith('onnx') else found(name, *rest)\n"
        f"from tools.export import main\nmain(['--model_pt', '{RUN}', '--to', 'onnx'])\n"
    )
    done = subprocess.run([str(python), "without.py"], cwd=project, capture_output=True, text=True, check=False)
    assert "python -m pip install onnx onnxscript onnxruntime" in done.stderr


OTHERS = {"boxes": "output_1", "text": "output"}


@pytest.mark.parametrize("name", ["boxes", pytest.param("text", marks=pytest.mark.full)])
def test_a_model_of_another_task_is_exported(project: Path, python: Path, name: str) -> None:
    """Several outputs; whole numbers as inputs."""
    config = f"examples/{name}/config.yaml"
    short = ["--progress.epoch", "null", "--progress.max_steps", "2", "--optim.lr_scheduler.warmup", "0"]
    call(project, python, "train.py", "--config", config, *short, "--batch_size", "8")
    assert f"{OTHERS[name]}: differs by up to" in exported(project, python, "onnx", run=f"experiments/{name}")


@pytest.mark.full
def test_a_program_in_cpp(project: Path, python: Path) -> None:
    """The page's own, compiled by the page's own command."""
    said = exported(project, python, "aoti", "--out", "model.aoti.pt2")
    assert float(re.findall(r"up to (\S+) from the model", said)[0]) < 1e-5
    page = (project / "docs" / "tools" / "export.md").read_text()
    ((_, code),) = [block for block in BLOCK.findall(page) if block[0] == "cpp"]
    ((_, commands),) = [block for block in BLOCK.findall(page) if "main.cpp" in block[1] and block[0] == "sh"]
    (project / "main.cpp").write_text(code)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-euc", commands], cwd=project, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ones = "import torch\nfrom cli.trained import load_trained\n"
    ones += f"print(load_trained('{RUN}').task.model(torch.ones(1, 1, 8, 8)).tolist()[0])"
    expected = json.loads(call(project, python, "-c", ones).splitlines()[-1])
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected, abs=1e-4)
    REPORT.append("an exported model in C++")


@pytest.fixture(params=["model.onnx", "model.pt2"])
def server(request: pytest.FixtureRequest, project: Path, python: Path) -> Iterator[str]:
    """The address of a server of an exported model, which ends with the test."""
    file = project / RUN / "export" / str(request.param)
    if not file.is_file():
        exported(project, python, "onnx" if file.suffix == ".onnx" else "torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = ["--port", str(port), "--max_bytes", "20000"]
    command = [str(python), "-m", "examples.serving.server", "--model", str(file), *limits]
    log = project / "serve.log"
    programs = project / "programs"  # a Ghostscript that leaves a trace
    programs.mkdir(exist_ok=True)
    (programs / "gs").write_text(f"#!/bin/sh\ntouch '{project}/gs_ran'\n")
    (programs / "gs").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=project, env=environment, stderr=output, stdout=output) as process,
    ):
        try:
            for _ in range(600):
                if "running on" in log.read_text() or process.poll() is not None:
                    break
                time.sleep(0.1)
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


ASK = """
import io, json, sys
import httpx
from PIL import Image
url, image = sys.argv[1], open("0.png", "rb").read()
picture = io.BytesIO()
Image.new("1", (5000, 5001)).save(picture, "PNG")  # 3 kB, and a million pixels too many
eps = b"%!PS-Adobe-3.0 EPSF-3.0\\n%%BoundingBox: 0 0 8 8\\n%%EndComments\\nshowpage\\n"
with httpx.Client(timeout=60) as client:
    answers = {
        "health": client.get(f"{url}/health"),
        "raw": client.post(f"{url}/predict", content=image),
        "form": client.post(f"{url}/predict", files={"file": ("0.png", image)}),
        "no image": client.post(f"{url}/predict", content=b"no image"),
        "cut off": client.post(f"{url}/predict", content=image[:-30]),
        "nothing": client.post(f"{url}/predict"),
        "no file": client.post(f"{url}/predict", data={"file": "text"}),
        "bad form": client.post(f"{url}/predict", content=b"x", headers={"content-type": "multipart/form-data"}),
        "many pixels": client.post(f"{url}/predict", content=picture.getvalue()),
        "PostScript": client.post(f"{url}/predict", content=eps),
        "large": client.post(f"{url}/predict", content=bytes(20001)),
        "chunks": client.post(f"{url}/predict", content=(bytes(999) for _ in range(99))),
        "large form": client.post(f"{url}/predict", files={"file": ("0.png", bytes(20001))}),
        "after all": client.post(f"{url}/predict", content=image),
    }
print(json.dumps({name: [answer.status_code, answer.json()] for name, answer in answers.items()}))
"""
CODES = {
    "health": 200, "raw": 200, "form": 200, "no image": 422, "cut off": 422, "nothing": 400, "no file": 422,
    "many pixels": 422, "PostScript": 422, "bad form": 400, "large": 413, "chunks": 413, "large form": 413,
    "after all": 200,
}  # fmt: skip


def test_a_server_answers_as_predict_py(project: Path, python: Path, server: str) -> None:
    """As body or form; anything else gets a code and a sentence, and nothing of the server's inside.

    No picture is decoded that is too large or whose format would start a program.
    """
    answers = json.loads(call(project, python, "-c", ASK, server).splitlines()[-1])
    assert {name: code for name, (code, _) in answers.items()} == CODES | {"no file": answers["no file"][0]}
    assert answers["no file"][0] in (400, 422)
    call(project, python, "predict.py", "--model_pt", RUN, "--input", "0.png")
    row = json.loads((project / RUN / "predict" / "predictions.jsonl").read_text())
    for name in ("raw", "form", "after all"):
        found = answers[name][1]
        assert (found["prediction"], found["class"]) == (row["prediction"], row["class"])
        assert found["top"] == pytest.approx(row["top"], abs=1e-5)
    log = (project / "serve.log").read_text()
    for reason in ("Image size (25005000 pixels) exceeds limit", "it is not in one of the formats BMP, GIF"):
        assert reason in log
    assert not (project / "gs_ran").exists()
    refused = [body["detail"] for code, body in answers.values() if code != 200]
    assert all(isinstance(each, str) and len(each) > 20 for each in refused), refused
    assert not any(word in each for each in refused for word in ("Traceback", "0x", "/", "Error")), refused
    assert answers["health"][1]["status"] == "ok"
    REPORT.append("examples.serving.server with a real client")


def test_what_cannot_be_served(project: Path, python: Path) -> None:
    command = [str(python), "-m", "examples.serving.server", "--model", "nothing.onnx"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "there is no nothing.onnx; export a model first: python -m tools.export" in done.stderr
