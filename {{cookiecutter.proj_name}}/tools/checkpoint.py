"""Look into a checkpoint: python -m tools.checkpoint FILE [--weights OUT | --config]"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from common.base.files import atomic_file, output_file
from common.base.parts import AVERAGE
from common.checkpoint.file import read_checkpoint, write_checkpoint
from common.checkpoint.folder import best_in
from common.checkpoint.weights import averaged_state_dict
from common.config import dump
from common.config.problem import join_names
from cli.program import run

_LONGEST = 80  # characters that are shown of a value


def main(argv: list[str]) -> int:
    """Print the contents of a checkpoint, or write its weights alone to a file."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoint", description=__doc__)
    parser.add_argument("file", type=lambda word: best_in(Path(word)), help="a checkpoint, or a run: its best one")
    parser.add_argument("--weights", type=Path, metavar="OUT", help="write the weights alone, as .pt or .safetensors")
    parser.add_argument("--config", action="store_true", help="print the whole config of the run instead")
    options = parser.parse_args(argv)
    state = read_checkpoint(options.file)
    if options.weights is not None:
        export(averaged_state_dict(state["model"], state), options.weights)
        without = f" without {len(state['frozen'])} frozen tensors, which are not in the file"
        print(f"wrote {options.weights}{without if state.get('frozen') else ''}")
    elif options.config:
        print(dump(state["about"]["config"]), end="")
    else:
        print(summary(options.file, state), flush=True)
    return 0


def summary(path: Path, state: Mapping[str, Any]) -> str:
    """Position, results, environment and every tensor of the model, as text."""
    at, best, config, weights = state["position"], state["best"]["best"], state["about"]["config"], state["model"]
    facts = {
        "validated": state["values"],
        "best": best and {"step": best[1], **best[2]},
        "average": f"{state[AVERAGE]['updates']} updates" if state[AVERAGE] else None,
        "parts": ", ".join(state),
        **state["fingerprint"],
        "code": f"{len(state['fingerprint'].get('code', {}))} files",
    }
    facts.pop("data", None)  # checksums of the samples that were read
    line = f"  {{:<{max(map(len, weights))}}}  {{:<8}} {{}}"
    tensors = [item for item in weights.values() if isinstance(item, Tensor)]
    frozen = list(state.get("frozen", ()))
    lines = [
        f"{path}: format {state['format']}, {path.stat().st_size:,} bytes, all checksums right",
        f"step {at['step']}, epoch {at['epoch']}, sample {at['sample']} of {at['epoch_size']}",
        dump(facts).rstrip(),
        f"run {config['name']}, model {config['model']['type']} (--config shows all)",
        *(line.format(name, *_described(item)) for name, item in weights.items()),
        f"  {sum(tensor.numel() for tensor in tensors):,} numbers",
        *([f"{len(frozen)} frozen tensors are not in it: {join_names(frozen)}"] if frozen else []),
    ]
    return "\n".join(lines)


def _described(item: Any) -> tuple[str, str]:
    """Return the type and the shape of a tensor, or the value of other state."""
    if isinstance(item, Tensor):
        return str(item.dtype).removeprefix("torch."), str(tuple(item.shape))
    text = repr(item)
    return type(item).__name__, text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def export(weights: Mapping[str, Any], path: Path) -> None:
    """Write weights alone: a state dict for `torch.load(..., weights_only=True)`, or a safetensors file, of tensors."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save  # optional

        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        if others := weights.keys() - tensors.keys():
            print(f"not in {path}, which holds tensors only: {join_names(sorted(others))}")
        data = save({name: value.contiguous().clone() for name, value in tensors.items()})
        with output_file(path), atomic_file(path) as file:
            file.write(data)
    else:
        with output_file(path):
            write_checkpoint(weights, path)


if __name__ == "__main__":
    run(main)
