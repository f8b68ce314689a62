"""Look into a checkpoint: python -m common.checkpoint FILE [--weights OUT | --consolidate OUT | --config]"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.checkpoint.file import write_checkpoint, write_file
from common.checkpoint.shards import read_checkpoint
from common.config import dump
from common.failure.program import reported
from common.optim.ema import averaged_state_dict


def main(argv: list[str]) -> int:
    """Print what a checkpoint holds, or write its weights alone, or a sharded one as a whole, to a file."""
    parser = argparse.ArgumentParser(prog="python -m common.checkpoint", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--weights", type=Path, metavar="OUT", help="write the weights alone, as .pt or .safetensors")
    parser.add_argument(
        "--consolidate", type=Path, metavar="OUT", help="write all of a sharded checkpoint (FSDP) as one file"
    )
    parser.add_argument("--config", action="store_true", help="print the whole config of the run instead")
    options = parser.parse_args(argv)
    state = read_checkpoint(options.file)
    if options.weights is not None:
        export(averaged_state_dict(state["model"], state["ema"]), options.weights)
        print(f"wrote {options.weights}")
    elif options.consolidate is not None:
        write_checkpoint(state, options.consolidate)
        print(f"wrote {options.consolidate}")
    elif options.config:
        print(dump(state["about"]["config"]), end="")
    else:
        print(summary(options.file, state), flush=True)
    return 0


def summary(path: Path, state: Mapping[str, Any]) -> str:
    """Position, results, surroundings and every tensor of the model, as text."""
    at, best = state["position"], state["best"]["best"]
    lines = [
        f"{path}: format {state['format']}, {path.stat().st_size:,} bytes, all checksums right",
        f"  position   step {at['step']}, epoch {at['epoch']}, sample {at['sample']} of {at['epoch_size']}",
        f"  validated  {_values(state['values'])}",
        f"  best       {'none' if best is None else f'step {best[1]}: ' + _values(best[2])}",
        f"  average    {'of the weights, ' + str(state['ema']['updates']) + ' updates' if state['ema'] else 'none'}",
        f"  parts      {', '.join(state)}",
    ]
    shown = {**state["fingerprint"], "code": f"{len(state['fingerprint'].get('code', ()))} files"}
    lines += [f"  {key:<24} {value}" for key, value in shown.items()]
    config = state["about"].get("config", {})
    lines.append(
        f"  run {config.get('name', '?')}, model {config.get('model', {}).get('type', '?')} (--config shows all)"
    )
    width = max(map(len, state["model"]), default=0)
    total = 0
    for name, value in state["model"].items():
        total += value.numel()
        lines.append(f"    {name:<{width}}  {str(value.dtype).removeprefix('torch.'):<8} {tuple(value.shape)}")
    return "\n".join([*lines, f"    {total:,} numbers"])


def export(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights alone: a state dict for `torch.load(..., weights_only=True)`, or a safetensors file."""
    if path.suffix != ".safetensors":
        write_file(path, lambda file: torch.save(dict(weights), file))
        return
    try:
        from safetensors.torch import save  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UserError("writing .safetensors needs the package: pip install safetensors") from error
    data = save({name: value.contiguous().clone() for name, value in weights.items()})
    write_file(path, lambda file: file.write(data))


def _values(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.6g}" for name, value in values.items()) or "nothing yet"


if __name__ == "__main__":
    with reported():
        sys.exit(main(sys.argv[1:]))
