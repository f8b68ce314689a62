"""Loads weights from a checkpoint or any weights file into a model: all of them, or those that fit, with a report."""

import re
from collections.abc import Collection
from dataclasses import field
from fnmatch import fnmatchcase
from http.client import HTTPException
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from loguru import logger
from torch import Tensor, nn

from common.base.errors import UserError
from common.base.parts import AVERAGE
from common.base.text import flat
from common.checkpoint.file import CheckpointError, State, is_checkpoint, load_archive
from common.checkpoint.layout import EXTRA
from common.config import section
from common.config.problem import join_names
from common.distributed import Rank, main_first


@section
class InitConfig:
    """Weights that a new run starts from. Not a resume: everything else starts from its beginning."""

    path: str | None = None
    """checkpoint, file of weights, or URL; null: none"""
    prefix: str = ""
    """take only keys with this prefix, without it: "backbone.", "state_dict.module." """
    rename: list[list[str]] = field(default_factory=list)
    """[pattern, replacement] pairs (regular expressions), applied to keys in order"""
    exclude: list[str] = field(default_factory=list)
    """keys to skip, in the file and in the model, as in "head.*" """
    strict: bool = True
    """keys that do not match are an error; false: load what fits"""


def load_weights(model: nn.Module, weights: State, source: str, left_out: Collection[str] = ()) -> None:
    """Load a state dict into the unwrapped model. Tensors named in `left_out` stay as they are.

    Raises:
        UserError: keys are missing, left over, or of another shape; the message lists which.
    """
    own = model.state_dict()
    kept = {name: own[name] for name in left_out if name in own}
    try:
        model.load_state_dict({**kept, **weights})
    except RuntimeError as error:
        raise UserError(
            f"{source} is of a different model: {error}\n"
            "  Does model.* in the config describe the model that was trained? With init_from, exclude keeps initial\n"
            "  values, strict: false loads what fits."
        ) from error


def init_weights(model: nn.Module, config: InitConfig, project: Path, rank: Rank) -> None:
    """Start `model` from the weights that `config` names, and log which were loaded and which were not.

    Every process must call it. The main process downloads first.

    Raises:
        CheckpointError: the file cannot be downloaded or read, or holds no weights.
        UserError: with `strict`, something does not fit; in any case, when nothing fits.
    """
    source = weights_path(config.path, project)
    if source is None:
        return
    path = Path(source)
    if _is_address(source):
        path = _download(source, rank)
    weights = _read_weights(path, config)
    own = model.state_dict()
    others = join_names(sorted(weights.keys() - own.keys()))
    fitting = {}
    kept = []
    for key, value in own.items():
        if key in weights and (config.strict or _shape(weights[key]) == _shape(value)):
            fitting[key] = weights[key]
        elif _is_excluded(key, config) or not config.strict:
            kept.append(key)
        weights.pop(key, None)
    if not fitting:
        raise UserError(
            f"init_from: no key of the file fits the model; prefix and rename can change that. {path} has: {others}"
        )
    if config.strict:
        fitting |= weights  # those that the model does not have
    load_weights(model, fitting, f"init_from: {path}", kept)
    report = f"{len(own) - len(kept)} of {len(own)} entries of the model from {path}"
    initial = join_names(kept) or "none"
    logger.info("init_from: {}; as initialized: {}; not in the model: {}", report, initial, others or "none")


def _is_excluded(key: str, config: InitConfig) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in config.exclude)


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)  # other state is a module's own: its `set_extra_state` checks it


def weights_path(path: str | None, project: Path) -> str | None:
    """`init_from.path`, absolute: a relative one starts at the project. None and web addresses are unchanged."""
    if path is None or _is_address(path):
        return path
    return str(project / Path(path).expanduser())


def _is_address(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _download(address: str, rank: Rank) -> Path:
    """Return the file of a web address in torch's cache; the main process downloads it first, if it is not there."""
    name = address.partition("?")[0].rpartition("/")[2]
    number = crc32(address.encode())  # two addresses, two files
    path = Path(torch.hub.get_dir(), "checkpoints", f"{number:08x}-{name}")
    with main_first(rank):
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(address, str(path), progress=False)
            except (OSError, HTTPException) as error:
                hint = "if you have the file, set path to it"
                raise CheckpointError(f"init_from.path {address} cannot be downloaded: {error}; {hint}") from error
    return path


def _read_weights(path: Path, config: InitConfig) -> dict[str, Any]:
    """Read weights: those with the prefix, renamed, and not excluded."""
    state = load_archive(path)
    if is_checkpoint(state, path):
        named = averaged_state_dict(state["model"], state)
    elif isinstance(state, dict):
        named = flat(state)
    else:
        raise CheckpointError(f"init_from: {path} has no weights (a dict of names and tensors)")
    weights = {}
    for key, value in named.items():
        if key.startswith(config.prefix) and (isinstance(value, Tensor) or key.endswith(EXTRA)):
            key = key.removeprefix(config.prefix)
            for pattern, replacement in config.rename:
                key = re.sub(pattern, replacement, key)
            if not _is_excluded(key, config):
                weights[key] = value
    return weights


def averaged_state_dict(model_state: State, checkpoint: State) -> dict[str, Any]:
    """`model_state` with the averages that a checkpoint holds, in the model's dtypes; unchanged if there are none."""
    averaged = dict(model_state)
    average = checkpoint.get(AVERAGE, {})
    for name, value in average.get("shadow", {}).items():
        if name in averaged:
            averaged[name] = value.to(averaged[name].dtype)
    return averaged
