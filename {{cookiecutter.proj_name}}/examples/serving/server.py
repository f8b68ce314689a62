"""Serve an exported model over HTTP: python -m examples.serving.server --model experiments/default/export/model.onnx

POST /predict takes an image, as the file of a form or as the body; GET /health says which model answers. The server
prepares an image with the project's own dataset, so its answers are those of predict.py.
"""

import argparse
import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from common.base.errors import UserError
from common.base.text import plain
from common.config.registry import DATASET_REGISTRY
from common.failure.program import exit_process, report_errors
from common.monitor.log import logger, setup_log
from tools.predict import build_files, likeliest
import custom.config  # noqa: F401 - fills the registries

Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
MAX_BYTES, MAX_PIXELS = 10_000_000, 25_000_000  # of a request, and of an image in it


def load(path: Path, about: Mapping[str, Any]) -> Run:
    """Return a function that runs the model: inputs by name -> outputs by name. Several threads may call it at once."""
    if path.suffix == ".onnx":
        need("onnxruntime")
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

        def run_onnx(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = session.run(list(about["outputs"]), {name: value.numpy() for name, value in inputs.items()})
            return dict(zip(about["outputs"], map(torch.from_numpy, outputs), strict=True))

        return run_onnx
    if about["format"] != "torch":
        raise UserError(f"{path}: served are files that tools.export writes with --to onnx or torch")
    program = torch.export.load(path).module()

    @torch.no_grad()
    def run_torch(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = program(*(inputs[name] for name in about["inputs"]))
        return dict(zip(about["outputs"], outputs if isinstance(outputs, tuple) else [outputs], strict=True))

    return run_torch


def answer(run: Run, about: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """Return the prediction for the bytes of a file. Raises `UserError` if they cannot be read."""
    sample = build_files(about["dataset"], "eval", [io.BytesIO(data)])[0]
    inputs = {}
    for name, entry in about["inputs"].items():
        inputs[name] = sample[entry["key"]][None].to(getattr(torch, entry["dtype"]))
    outputs = run(inputs)
    first, classes = next(iter(outputs.values())), about["classes"]
    if not (classes and len(outputs) == 1 and first.shape == (1, len(classes))):
        return {name: value[0].tolist() for name, value in outputs.items()}
    return likeliest(first.float().softmax(dim=1), first.argmax(dim=1), classes)[0]


def limit_images(pixels: int) -> None:
    """From now on, refuse images with more pixels before they are decoded.

    Half a megabyte can hold an image of half a gigabyte. Pillow warns above its limit, and refuses above twice as many.
    """
    Image.MAX_IMAGE_PIXELS = pixels // 2
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def build_app(path: Path, limit: int) -> Any:
    """Build the web application. `limit`: the largest body of a request, bytes."""
    from anyio import CapacityLimiter, to_thread  # FastAPI is built on it
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse

    about = describe(path)
    run, app = load(path, about), FastAPI(title=path.name)
    limiter = CapacityLimiter(os.cpu_count() or 1)  # more at once would need memory, and be no faster

    async def body(request: Request) -> bytes:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise HTTPException(413, f"the request has more than {limit:,} bytes")
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            return data

        async def again() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        async with Request(request.scope, again).form() as form:
            files = [value for value in form.values() if not isinstance(value, str)]
            if len(files) != 1:
                raise HTTPException(400, f"the form has {len(files)} files; send one: curl -F file=@image.png URL")
            return await files[0].read()

    async def predict(request: Request) -> JSONResponse:
        data = await body(request)
        if not data:
            raise HTTPException(400, "the request has no body; send an image: curl --data-binary @image.png URL")
        try:
            return JSONResponse(plain(await to_thread.run_sync(answer, run, about, data, limiter=limiter)))
        except UserError as error:
            logger.info("{}", error)
            raise HTTPException(422, "the body is no file that this model can read, or too large an image") from error

    async def health() -> dict[str, Any]:
        return {"status": "ok", "file": path.name, **{key: about[key] for key in ("format", "sha256", "step")}}

    async def answer_error(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the server failed; its log says why"}, 500)

    app.add_api_route("/predict", predict, methods=["POST"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_exception_handler(Exception, answer_error)
    return app


def describe(path: Path) -> dict[str, Any]:
    """Return what `tools.export` wrote beside the model. Raises `UserError` if it cannot be served."""
    file = path.with_name(f"{path.name}.json")
    if not path.is_file() or not file.is_file():
        missing = file if path.is_file() else path
        raise UserError(f"there is no {missing}; export a model first: python -m tools.export --to onnx --model_pt ...")
    about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not hasattr(DATASET_REGISTRY.get(about["dataset"]["type"]), "from_files"):
        build_files(about["dataset"], "eval", [])  # raises the error that says what to write
    if computed := [name for name, entry in about["inputs"].items() if entry["key"] is None]:
        raise UserError(f"{path}: the task computes {', '.join(computed)}, so a file alone is not enough to predict")
    return about


def need(*packages: str) -> None:
    """Raise a `UserError` that says how to install packages, if one is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name.replace("-", "_")) is None]:
        names = " ".join(missing)
        raise UserError(f"the server needs {names}, not installed here: python -m pip install {names}")


def main(argv: list[str]) -> int:
    """Serve until a signal ends it. Returns the exit code."""
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m examples.serving.server", description=about, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="a file that tools.export wrote")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_bytes", type=int, default=MAX_BYTES, help="largest request; by default 10 million")
    parser.add_argument("--max_pixels", type=int, default=MAX_PIXELS, help="largest image; by default 25 million")
    options = parser.parse_args(argv)
    setup_log()
    limit_images(options.max_pixels)
    need("fastapi", "uvicorn", "python-multipart")
    import uvicorn

    uvicorn.run(build_app(options.model, options.max_bytes), host=options.host, port=options.port, log_config=None)
    return 0


if __name__ == "__main__":
    with report_errors():
        exit_process(main(sys.argv[1:]))
