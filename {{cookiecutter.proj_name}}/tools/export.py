"""Export a trained model: python -m tools.export --model_pt experiments/default --to torch|onnx|int8|...

Each program takes any number of samples at once, and is compared with the model it was made from before it gets its
name. A .json file beside it says what it expects and gives. See docs/export.md.
"""

import argparse
import copy
import hashlib
import importlib.util
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.base.context import error_context
from common.base.errors import UserError
from common.base.files import write_text
from common.base.text import plain
from common.build import build_evaluation, build_set, build_stream
from common.config import option_value
from common.evaluator import Evaluator
from common.failure.program import exit_process, report_errors
from common.monitor.log import setup_log
from common.progress import Position
from common.run.paths import RunPaths
from cli.advice import explain_errors
from cli.trained import Trained, load_trained

Tensors = dict[str, Tensor]
Run = Callable[[Tensors], Tensors]  # a program: inputs by name -> outputs by name

_ONNX = ("onnx", "onnxscript", "onnxruntime")
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {  # the name of the file, and the packages it needs
    "torch": ("model.pt2", ()),
    "aoti": ("model.aoti.pt2", ()),
    "onnx": ("model.onnx", _ONNX),
    "int8": ("model.int8.onnx", _ONNX),
    "safetensors": ("model.safetensors", ("safetensors",)),
}
BATCHES = (1, 2, 3, 7, 16)  # sizes for which a program is compared with the model
CALIBRATION = 20  # training batches from which int8 learns the ranges of values


class Plain(nn.Module):
    """A model whose inputs are given by position, and whose outputs are a tensor or a tuple of tensors."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = tuple(flat(self.model(**dict(zip(self.names, inputs, strict=True)))).values())
        return found if len(found) > 1 else found[0]


@dataclass(frozen=True)
class Model:
    """A model to export: the inputs that the task gives it for some samples, and its outputs, all by name.

    Attributes:
        keys: of each input, the part of a sample that it is; None if the task computes it.
    """

    trained: Trained
    module: nn.Module
    inputs: Tensors
    keys: Mapping[str, str | None]

    @property
    def plain(self) -> Plain:
        return Plain(self.module, list(self.inputs)).eval()

    def outputs(self, inputs: Tensors) -> Tensors:
        """What the model itself computes."""
        with torch.no_grad():
            return flat(self.module(**inputs))

    def replace(self, run: Run) -> None:
        """From now on, the task computes with `run` in place of its model: inputs by name -> outputs by name."""
        with torch.no_grad():
            example = self.module(**self.inputs)

        def replaced(*given: Tensor, **named: Tensor) -> Any:
            found = run(dict(zip(self.inputs, given, strict=False)) | named)
            found = {name: value.to(self.trained.rank.device) for name, value in found.items()}
            if isinstance(example, Tensor):
                return found["output"]
            return found if isinstance(example, Mapping) else tuple(found.values())

        setattr(self.module, "forward", replaced)  # noqa: B010 - mypy rejects an assignment


def flat(output: Any) -> Tensors:
    """The tensors that a model returned, by name. Raises `UserError` for anything but one, a tuple or a mapping."""
    if isinstance(output, Tensor):
        return {"output": output}
    named = output if isinstance(output, Mapping) else {f"output_{at}": each for at, each in enumerate(output)}
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise UserError("the model returns something other than tensors, or tensors inside of each other's lists")
    return dict(named)


def inputs_of(trained: Trained, batch: Any) -> tuple[Tensors, dict[str, str | None]]:
    """What the task calls its model with for a loaded batch, by the names of the parameters; and the keys of a batch.

    Raises:
        UserError: the task does not call the model itself (but a part of it), or with other things than tensors.
    """
    task, calls = trained.task, list[tuple[Any, Any]]()
    model: nn.Module = task.model
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        task.output(task.prepare_batch(trained.precision.cast_batch(batch), trained.rank.device))
    hook.remove()
    kind = f"{type(model).__name__} of {type(task).__name__}"
    if not calls:
        raise UserError(f"the task never calls the whole {kind}, so there is nothing that could be exported as one")
    found: Tensors = inspect.signature(model.forward).bind(*calls[0][0], **calls[0][1]).arguments
    if other := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{kind} is called with {', '.join(other)}, which are no tensors; only tensors can be exported")
    parts = batch.items() if isinstance(batch, Mapping) else ()
    keys = {name: next((key for key, part in parts if _is_same(part, value)), None) for name, value in found.items()}
    return found, keys


def _is_same(part: Any, value: Tensor) -> bool:
    return isinstance(part, Tensor) and part.shape == value.shape and torch.equal(part.to(value), value)


def read_model(trained: Trained) -> Model:
    """The model, with inputs for eight samples of the run's own data."""
    label, section = trained.section()
    split, _, name = label.partition(".")
    trained = replace(trained, config=replace(trained.config, num_workers=0))
    loader = build_set(trained.config, split, name, {**section, "eval_batch_size": 8}, trained.rank, trained.seed)
    inputs, keys = inputs_of(trained, next(iter(loader)))
    return Model(trained, trained.task.model, inputs, keys)


def write(model: Model, form: str, path: Path) -> None:
    """Write the model to `path` in one of FORMS, except int8."""
    inputs = tuple(model.inputs.values())
    shapes = {"inputs": tuple({0: torch.export.Dim("batch")} for _ in inputs)}
    if form == "safetensors":
        from safetensors.torch import save_file

        weights = {name: value.detach().contiguous().clone() for name, value in model.module.state_dict().items()}
        save_file(weights, path, metadata={"format": "pt"})
    elif form == "onnx":
        torch.onnx.export(
            model.plain, inputs, path, input_names=list(model.inputs), output_names=list(model.outputs(model.inputs)),
            dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False,
        )  # fmt: skip
    else:
        program = torch.export.export(model.plain, inputs, dynamic_shapes=shapes)
        if form == "torch":
            torch.export.save(program, path)
        else:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def read(model: Model, form: str, path: Path) -> Run:
    """A function that runs what was written: inputs by name -> outputs by name."""
    names = list(model.outputs(model.inputs))
    if form in ("onnx", "int8"):
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

        def run(inputs: Tensors) -> Tensors:
            arrays = session.run(names, {name: value.cpu().numpy() for name, value in inputs.items()})
            return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

        return run
    if form == "safetensors":
        from safetensors.torch import load_file

        loaded = replace(model, module=copy.deepcopy(model.module))
        loaded.module.load_state_dict({name: value.zero_() for name, value in loaded.module.state_dict().items()})
        loaded.module.load_state_dict(load_file(path))
        return loaded.outputs
    program = torch.export.load(path).module() if form == "torch" else torch._inductor.aoti_load_package(str(path))

    def call(inputs: Tensors) -> Tensors:
        with torch.no_grad():
            output = program(*inputs.values())
        return dict(zip(names, flat(output).values(), strict=True))

    return call


def compare(model: Model, run: Run, tolerance: float) -> float:
    """The largest difference between the outputs of a program and of the model, for several numbers of samples.

    It is in proportion to the largest value of the output, if that is above 1.

    Raises:
        UserError: it is above `tolerance`.
    """
    worst = dict.fromkeys(model.outputs(model.inputs), 0.0)
    for size in BATCHES:
        inputs = {name: value[torch.arange(size) % len(value)] for name, value in model.inputs.items()}
        found = run(inputs)
        for name, expected in model.outputs(inputs).items():
            scale = max(1.0, float(expected.double().abs().max()))
            difference = float((found[name].cpu().double() - expected.cpu().double()).abs().max()) / scale
            worst[name] = max(worst[name], difference if difference == difference else float("inf"))
    for name, difference in worst.items():
        print(f"  {name}: differs by up to {difference:.2g} from the model, in batches of {BATCHES}")
    largest = max(worst.values())
    if largest > tolerance:
        raise UserError(f"the program differs from the model by {largest:.2g}, more than --tolerance {tolerance}")
    return largest


def quantize(model: Model, path: Path) -> None:
    """Write the model with weights and activations of 8 bits, whose ranges are those in batches of training data.

    Beside it remain two files that are only steps on the way.
    """
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    trained = model.trained
    stream = build_stream(trained.config, trained.rank, trained.seed)
    steps = islice(stream.epoch(Position(epoch_size=stream.epoch_size)), CALIBRATION)
    batches = (inputs_of(trained, batch)[0] for step in steps for batch in step.batches)

    class Reader:
        def get_next(self) -> Any:
            inputs = next(batches, None)
            return inputs and {name: value.cpu().numpy() for name, value in inputs.items()}

    write(model, "onnx", path.with_suffix(".float"))
    quant_pre_process(str(path.with_suffix(".float")), str(path.with_suffix(".prepared")))
    quantize_static(str(path.with_suffix(".prepared")), str(path), Reader(), per_channel=True)


def measure(model: Model, run: Run) -> dict[str, list[float]]:
    """Each loss and metric on the data of validation: of the model itself, and of a program in its place."""
    trained = model.trained
    split = (trained.config.dataset.val and "val") or "eval"
    sets = build_evaluation(trained.config, split, trained.rank, trained.seed)
    evaluator = Evaluator(trained.task, trained.rank, trained.precision)
    before = evaluator.run(sets).values
    model.replace(run)
    after = evaluator.run(sets).values
    for name, value in before.items():
        print(f"  {name} on {split}: {value:.6g}, and {after[name]:.6g} with 8 bits ({after[name] - value:+.3g})")
    return {name: [value, after[name]] for name, value in before.items()}


def description(model: Model, form: str) -> dict[str, Any]:
    """What a user of the exported file must know, as plain values."""
    trained, config = model.trained, model.trained.config

    def shape(named: Tensors) -> dict[str, Any]:
        dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in named.items()}
        return {name: {"shape": ["batch", *value.shape[1:]], "dtype": dtypes[name]} for name, value in named.items()}

    section = dict(trained.section()[1])
    scales = [each for each in section.get("transforms") or () if each["type"] == "Normalize"] or [{}]
    return {
        "format": form,
        "checkpoint": str(trained.path),
        "sha256": hashlib.sha256(trained.path.read_bytes()).hexdigest(),
        "step": trained.position["step"],
        "torch": torch.__version__,
        "task": config.task["type"],
        "model": config.model,
        "classes": list(trained.task.classes),
        "inputs": {name: {**each, "key": model.keys[name]} for name, each in shape(model.inputs).items()},
        "outputs": shape(model.outputs(model.inputs)),
        "mean": scales[0].get("mean"),
        "std": scales[0].get("std"),
        "dataset": section,
    }


def main(argv: list[str]) -> int:
    """Export, check and describe. Returns the exit code."""
    setup_log("WARNING", {"torch.onnx": "ERROR"})
    warnings.simplefilter("ignore")  # of torch about itself; whether the program is right is measured
    options, settings = command(argv)
    suffix, packages = FORMS[options.to]
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        names = " ".join(missing)
        raise UserError(f"--to {options.to} needs {names}, not installed here: python -m pip install {names}")
    if option_value(settings, "--gpu_ids") is None:
        settings = [*settings, "--gpu_ids", "-1"]
    model = read_model(load_trained(options.model_pt, settings))
    out = options.out or RunPaths.of_checkpoint(model.trained.path).root / "export" / suffix
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out.parent} cannot be written: {error.strerror}; choose another place with --out") from error
    about = description(model, options.to)
    kind = type(model.module).__name__
    with (
        error_context(lambda: f"in exporting {kind} to {options.to}; docs/export.md says what a model may contain"),
        tempfile.TemporaryDirectory(dir=out.parent, prefix=".export.") as folder,
    ):
        partial = Path(folder, out.name)
        if options.to == "int8":
            quantize(model, partial)
            about["measured"] = measure(model, read(model, options.to, partial))
        else:
            write(model, options.to, partial)
            about["difference"] = compare(model, read(model, options.to, partial), options.tolerance)
        write_text(out.with_name(f"{out.name}.json"), json.dumps(plain(about), indent=2) + "\n")
        partial.replace(out)
    print(f"wrote {out} ({out.stat().st_size:,} bytes) and {out.name}.json")
    return 0


def command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program; and all others, which are settings as of `evaluate.py`."""
    parser = argparse.ArgumentParser("python -m tools.export", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model_pt", required=True, help="checkpoint, or the folder of a run: its best one")
    parser.add_argument("--to", choices=list(FORMS), required=True)
    parser.add_argument("--out", type=Path, help="file to write; by default <run>/export/model.*")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference allowed; by default 1e-4")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    with report_errors(), explain_errors():
        exit_process(main(sys.argv[1:]))
