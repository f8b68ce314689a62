"""Export a trained model: python -m tools.export --model_pt experiments/default --to torch|aoti|onnx

Each program takes any number of samples at once, and is compared with the model it was made from before it gets its
name. A .json file beside it says what it expects and gives. See docs/tools/export.md.
"""

import argparse
import hashlib
import importlib.util
import inspect
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.base.errors import UserError, error_context
from common.base.files import write_text
from common.base.text import plain
from common.build import build_evaluation
from common.config import option_value
from common.data.sections import sets_of
from common.monitor.log import setup_log
from common.run.paths import RunPaths
from cli.program import run
from cli.trained import Trained, load_trained

Tensors = dict[str, Tensor]
Run = Callable[[Tensors], Tensors]  # a program: inputs by name -> outputs by name

FORMS = {"torch": "model.pt2", "aoti": "model.aoti.pt2", "onnx": "model.onnx"}  # and the name of the file
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
BATCHES = (1, 2, 3, 7, 16)  # sizes for which a program is compared with the model


class Model(nn.Module):
    """A model whose inputs are given by position, and whose outputs are a tensor or a tuple of tensors.

    Attributes:
        inputs: what the task gives the model for some samples, by name.
    """

    def __init__(self, model: nn.Module, inputs: Tensors) -> None:
        super().__init__()
        self.model, self.inputs, self.names = model, inputs, list(inputs)
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(flat(self.model(**dict(zip(self.names, inputs, strict=True)))).values())
        return outputs if len(outputs) > 1 else outputs[0]

    @torch.no_grad()
    def outputs(self, inputs: Tensors) -> Tensors:
        """Return what the model itself computes."""
        return flat(self.model(**inputs))


def flat(output: Any) -> Tensors:
    """Return the tensors that a model returned, by name.

    Raises `UserError` for anything but one, a tuple or a mapping.
    """
    if isinstance(output, Tensor):
        return {"output": output}
    named = output if isinstance(output, Mapping) else {f"output_{at}": item for at, item in enumerate(output)}
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise UserError("the model returns something other than tensors, or nested lists of tensors")
    return dict(named)


def read_model(trained: Trained) -> tuple[Model, dict[str, str | None]]:
    """Read the model, with what the task gives it for eight samples of the run's own data.

    Returns also the key of a sample that each input is; None if the task computes it.

    Raises:
        UserError: the task does not call the model itself (but a part of it), or with other things than tensors.
    """
    config, task, calls = replace(trained.config, num_workers=0), trained.task, list[tuple[Any, Any]]()
    loaders = build_evaluation(config, "eval", trained.rank) or build_evaluation(config, "val", trained.rank)
    if not loaders:
        raise UserError("dataset.eval and dataset.val are null in the config of this run, so there are no samples")
    loader = loaders[0]
    batch = loader.read_once(range(min(8, loader.size)))
    model: nn.Module = task.model
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        task.output(task.prepare_batch(trained.precision.cast_batch(batch), trained.rank.device))
    hook.remove()
    kind = f"{type(model).__name__} of {type(task).__name__}"
    if not calls:
        raise UserError(f"the task never calls the whole {kind}, so there is nothing to export as one")
    inputs: Tensors = inspect.signature(model.forward).bind(*calls[0][0], **calls[0][1]).arguments
    if other := [name for name, value in inputs.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{kind} is called with {', '.join(other)}, but only tensors can be exported")
    parts = batch.items() if isinstance(batch, Mapping) else ()
    keys = {name: next((key for key, part in parts if _is_same(part, value)), None) for name, value in inputs.items()}
    return Model(model, inputs), keys


def _is_same(part: Any, value: Tensor) -> bool:
    return isinstance(part, Tensor) and part.shape == value.shape and torch.equal(part.to(value), value)


def write(model: Model, form: str, path: Path) -> None:
    """Write the model to `path` in one of FORMS."""
    inputs = tuple(model.inputs.values())
    shapes = {"inputs": tuple({0: torch.export.Dim("batch")} for _ in inputs)}
    if form == "onnx":
        torch.onnx.export(
            model, inputs, path, input_names=model.names, output_names=list(model.outputs(model.inputs)),
            dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False,
        )  # fmt: skip
        return
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    if form == "torch":
        torch.export.save(program, path)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def read(model: Model, form: str, path: Path) -> Run:
    """Return a function that runs the written model: inputs by name -> outputs by name."""
    names = list(model.outputs(model.inputs))
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

        def run(inputs: Tensors) -> Tensors:
            arrays = session.run(names, {name: value.cpu().numpy() for name, value in inputs.items()})
            return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

        return run
    program = torch.export.load(path).module() if form == "torch" else torch._inductor.aoti_load_package(str(path))

    @torch.no_grad()
    def call(inputs: Tensors) -> Tensors:
        return dict(zip(names, flat(program(*inputs.values())).values(), strict=True))

    return call


def compare(model: Model, run: Run, tolerance: float) -> float:
    """Return the largest difference between the outputs of a program and of the model, for several numbers of samples.

    It is in proportion to the largest value of the output, if that is above 1.

    Raises:
        UserError: it is above `tolerance`.
    """
    worst = dict.fromkeys(model.outputs(model.inputs), 0.0)
    for size in BATCHES:
        inputs = {name: value[torch.arange(size) % len(value)] for name, value in model.inputs.items()}
        outputs = run(inputs)
        for name, expected in model.outputs(inputs).items():
            wanted = expected.cpu().double()
            found = outputs[name].cpu().double()
            finite = wanted.isfinite() | (found != wanted)  # masks are often infinite
            wanted, found = wanted.where(finite, 0), found.where(finite, 0)
            scale = max(1.0, float(wanted.abs().max()))
            difference = float((found - wanted).abs().max()) / scale
            worst[name] = max(worst[name], difference if difference == difference else float("inf"))
    for name, difference in worst.items():
        print(f"  {name}: differs by up to {difference:.2g} from the model, in batches of {BATCHES}")
    largest = max(worst.values())
    if largest > tolerance:
        raise UserError(f"the program differs from the model by {largest:.2g}, more than --tolerance {tolerance}")
    return largest


def shapes(named: Tensors) -> dict[str, Any]:
    """Shape and type of tensors, as plain values."""
    return {
        name: {"shape": ["batch", *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in named.items()
    }


def description(trained: Trained, model: Model, keys: Mapping[str, str | None], form: str) -> dict[str, Any]:
    """Return what a user of the exported file must know, as plain values."""
    config = trained.config
    splits = (config.dataset.eval, config.dataset.val)
    return {
        "format": form,
        "checkpoint": str(trained.path),
        "sha256": hashlib.sha256(trained.path.read_bytes()).hexdigest(),
        "step": trained.position["step"],
        "torch": torch.__version__,
        "task": config.task["type"],
        "model": config.model,
        "classes": list(trained.task.classes),
        "inputs": {name: {**entry, "key": keys[name]} for name, entry in shapes(model.inputs).items()},
        "outputs": shapes(model.outputs(model.inputs)),
        "dataset": next(section for split in splits for section in sets_of(split).values()),
    }


def main(argv: list[str]) -> int:
    """Export, check and describe. Returns the exit code."""
    setup_log("WARNING")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of torch about itself; whether the program is right is measured
    parser = argparse.ArgumentParser(
        "python -m tools.export", description=__doc__.splitlines()[0], allow_abbrev=False,
        epilog="All other options are settings, as of evaluate.py.",
    )  # fmt: skip
    parser.add_argument("--model_pt", required=True, help="checkpoint, or the folder of a run: its best one")
    parser.add_argument("--to", choices=list(FORMS), required=True)
    parser.add_argument("--out", type=Path, help="file to write; by default <run>/export/model.*")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference allowed; by default 1e-4")
    options, settings = parser.parse_known_args(argv)
    form = options.to
    if form == "onnx" and (missing := [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]):
        names = " ".join(missing)
        raise UserError(f"--to onnx needs {names}, not installed here: python -m pip install {names}")
    if option_value(settings, "--gpu_ids") is None:
        settings = [*settings, "--gpu_ids", "-1"]
    trained = load_trained(options.model_pt, settings)
    model, keys = read_model(trained)
    out = options.out or RunPaths.of_checkpoint(trained.path).root / "export" / FORMS[form]
    out.parent.mkdir(parents=True, exist_ok=True)
    about, kind = description(trained, model, keys, form), type(model.model).__name__
    with (
        error_context(f"in exporting {kind} to {form}; docs/tools/export.md says what a model may contain"),
        tempfile.TemporaryDirectory(dir=out.parent, prefix=".export.") as folder,
    ):
        partial = Path(folder, out.name)
        write(model, form, partial)
        about["difference"] = compare(model, read(model, form, partial), options.tolerance)
        write_text(out.with_name(f"{out.name}.json"), json.dumps(plain(about), indent=2) + "\n")
        partial.replace(out)
    print(f"wrote {out} ({out.stat().st_size:,} bytes) and {out.name}.json")
    return 0


if __name__ == "__main__":
    run(main)
