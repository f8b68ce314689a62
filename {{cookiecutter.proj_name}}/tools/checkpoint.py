"""Look into a checkpoint: python -m tools.checkpoint FILE [--weights OUT]"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.files import atomic_file
from common.checkpoint.file import full_disk_named, read_checkpoint
from common.checkpoint.folder import best_in
from common.checkpoint.weights import averaged_state_dict
from common.config import dump
from common.config.problem import join_names
from cli.program import run

_LONGEST = 80  # characters that are shown of a value


def main(argv: list[str]) -> int:
    """Print the contents of a checkpoint, or write its weights alone to a file."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoint", description=__doc__)
    parser.add_argument("file", type=best_in, help="a checkpoint, or a run: its best one")
    parser.add_argument("--weights", type=Path, metavar="OUT", help="write the weights alone, as .pt or .safetensors")
    options = parser.parse_args(argv)
    state = read_checkpoint(options.file)
    if options.weights is not None:
        export(averaged_state_dict(state["model"], state), options.weights)
        without = ""
        if state["frozen"]:
            without = f" without {len(state['frozen'])} frozen tensors, which are not in the file"
        print(f"wrote {options.weights}{without}")
    else:
        print(summary(options.file, state), flush=True)
    return 0


def summary(path: Path, state: Mapping[str, Any]) -> str:
    """Position, results, environment and every tensor of the model, as text."""
    at = state["position"]
    config = state["about"]["config"]
    facts = {"last validation": state["values"], "best": state["best"]["best"], **state["fingerprint"]}
    for name in ("code", "data"):  # checksums of files, and of the samples that were read
        facts.pop(name, None)
    lines = [
        f"{path}: format {state['format']}, {path.stat().st_size:,} bytes, all checksums right",
        f"step {at['step']}, epoch {at['epoch']}, sample {at['sample']} of {at['epoch_size']}",
        dump(facts).rstrip(),
        f"run {config['name']}, model {config['model']['type']}",
    ]
    numbers = 0
    for name, item in state["model"].items():
        text = repr(item)[:_LONGEST]
        if isinstance(item, Tensor):
            numbers += item.numel()
            text = f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
        lines.append(f"  {name}  {text}")
    lines.append(f"  {numbers:,} numbers")
    if state["frozen"]:
        lines.append(f"{len(state['frozen'])} frozen tensors are not in it: {join_names(list(state['frozen']))}")
    return "\n".join(lines)


def export(weights: Mapping[str, Any], path: Path) -> None:
    """Write weights alone: a state dict for `torch.load(..., weights_only=True)`, or a safetensors file, of tensors."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save  # optional

        tensors = {}
        for name, value in weights.items():
            if isinstance(value, Tensor):
                tensors[name] = value.contiguous().clone()
            else:
                print(f"not in {path}, which holds tensors only: {name}")
        with atomic_file(path) as file:
            file.write(save(tensors))
    else:
        with atomic_file(path) as file, full_disk_named():
            torch.save(weights, file)


if __name__ == "__main__":
    run(main)
