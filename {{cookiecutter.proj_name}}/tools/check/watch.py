"""A plugin that notes what changes in the owner's objects during a run, and what of it no checkpoint holds.

It appends lines of JSON to the file $CHECK_WATCH; `kind` says what a line is about:
  facts    what decides which checks apply
  part     a class or function of the owner that the run uses: its role there, and where it is
  module   a file of the owner that was imported
  change   an attribute, variable or default value that changed from one step to the next, and is not saved
With CHECK_PLAIN=1, dropout is off, and batch norms that are trained use their running statistics: what is left must
not depend on how the samples of a step are split.
"""

import gc
import json
import os
import pickle
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from common.config.registry import import_path
from common.data.view import innermost, is_map_style, kind_of
from common.distributed.seed import random_state_unchanged
from common.run.paths import PROJECT

_ENGINE = ("common", "cli", "tools", *(program.name for program in PROJECT.glob("*.py")))
# Packages whose objects may hold something of the owner's.
_HOLDERS = ("builtins", "collections", "functools", "common.data", "common.evaluation", "common.optim", "torch")
_PLAIN = ("builtins", "numpy", "torch", "random", "itertools", "collections", "datetime", "pathlib")
_HIDDEN = ("_parameters", "_buffers", "_modules", "param_groups", "defaults", "training", "at")
_MOST, _LARGE = 1000, 1 << 23  # items of a container, and bytes of an array, that are looked at


def attach(trainer: Any) -> None:
    """Watch this trainer. Called as a plugin, in each process."""
    modules = dict(trainer.task.named_modules())
    norms = {name: module for name, module in modules.items() if isinstance(module, _NormBase) and not frozen(module)}
    if os.environ.get("CHECK_PLAIN"):
        for module in modules.values():
            if isinstance(module, _DropoutNd) or module in norms.values():
                module.__dict__["train"] = lambda _=True, module=module: nn.Module.train(module, False)
            if isinstance(vars(module).get("dropout"), float):  # attention, recurrent networks
                module.__dict__["dropout"] = 0.0
    if trainer.rank.is_main:
        watch, data = Watch(trainer), trainer.stream.dataset
        users = [trainer.task, *(term.function for term in trainer.task.loss.terms)]
        watch.note(
            "facts",
            norms=[f"{type(module).__name__} {name}" for name, module in norms.items()],
            compares=[type(user).__name__ for user in users if getattr(user, "compares_samples", False)],
            data=kind_of(data),
            in_step=bool(getattr(data, "reads_in_step", False)),
            shares=not is_map_style(data) and callable(getattr(innermost(data), "share", None)),
        )
        trainer.monitor.after_step.append(watch.step)


class Watch:
    """Looks at the owner's objects after each step of `trainer`, and notes what changed."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.task, self.file = trainer, trainer.task, Path(os.environ["CHECK_WATCH"])
        self.before: dict[tuple[Any, ...], list[str]] = {}
        self.noted: set[str] = set()

    def note(self, kind: str, **values: Any) -> None:
        """Append a line, once."""
        if (text := json.dumps({"kind": kind, **values})) not in self.noted:
            self.noted.add(text)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def step(self) -> None:
        """Compare what the owner's objects and code hold with what it was after the step before."""
        with random_state_unchanged():
            saved, keys = saved_apart(self.trainer)
            for role, holder in holders(self.trainer):
                code = code_of(holder)
                file, name = file_of(code), getattr(code, "__qualname__", "")
                if isinstance(code, ModuleType):
                    self.note("module", file=file)
                elif role != "module" and "." not in name:
                    self.note("part", role=role, name=name, file=file)
                for attribute, value in variables(holder, self.task).items():
                    if self.has_changed((file, name, attribute, id(holder)), value):
                        # Small values occur by chance, too.
                        is_alone = isinstance(value, (bool, int, float)) and attribute.strip("_") not in keys
                        if is_alone or not set(leaves(value)) <= saved:
                            self.note("change", role=role, file=file, name=name, attribute=attribute)

    def has_changed(self, key: tuple[Any, ...], value: Any) -> bool:
        """Return whether a value is another one than after the step before."""
        before, self.before[key] = self.before.get(key), leaves(value)
        return before is not None and before != self.before[key]


def holders(run: Any) -> Iterator[tuple[str, Any]]:
    """Yield the owner's objects, functions, classes and modules with their role; "module": the run does not hold it."""
    task, plugins = run.task, [import_path(name) for name in run.config.plugins]
    roots = {
        "module": [module for name, module in list(sys.modules.items()) if _file_of_module(name)],
        "plugin": [plugins, run.state.user_parts, run.monitor.after_step],
        "schedule": run.schedule, "optimizer": run.optimizer, "task": task, "metric": task.metric, "loss": task.loss,
        "model": task.get_submodule("model"), "data": [run.stream, *run.val, *run.evaluation],
    }  # fmt: skip
    queue, seen = list(roots.items()), set[int]()
    while queue and len(seen) < 20 * _MOST:
        role, thing = queue.pop()  # from the data on: what several hold has the first role
        if id(thing) in seen or isinstance(thing, (Tensor, np.ndarray, str, int, type(run))):
            continue
        seen.add(id(thing))
        code = code_of(thing)
        if is_owners := bool(file_of(code)):
            yield role, thing
        if isinstance(thing, FunctionType):  # but not all variables of its module
            queue += [(role, kept) for kept in variables(thing, task).values() if is_owners]
        elif is_owners or (code is not thing and code.__module__.startswith(_HOLDERS)):
            queue += [(role, part) for part in gc.get_referents(thing)[:_MOST]]


def variables(holder: Any, task: Any) -> dict[str, Any]:
    """Return what an object, class or module holds by name, or a function in defaults, closure and attributes.

    Modules outside of the task, which no checkpoint holds, are replaced by their state.
    """
    if isinstance(holder, FunctionType):
        cells = [cell.cell_contents for cell in holder.__closure__ or ()]
        return {"": [holder.__defaults__, holder.__kwdefaults__, cells, vars(holder)]}
    held = {name: holder._buffers[name] for name in getattr(holder, "_non_persistent_buffers_set", ())}
    held |= {name: value for name, value in getattr(holder, "__dict__", {}).items() if not name.startswith("__")}
    known = set(task.modules())
    for name, value in held.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        alone = [item.state_dict() for item in items if isinstance(item, nn.Module) and item not in known]
        held[name] = alone or value
    return {name: value for name, value in held.items() if name not in _HIDDEN}


def saved_apart(run: Any) -> tuple[set[str], set[str]]:
    """Return the leaves of all states that the owner's parts return for the checkpoint, and the names in them."""
    parts = [*run.state.user_parts.values(), run.optimizer, run.schedule, innermost(run.stream.dataset)]
    states = [part.state_dict() for part in parts if hasattr(part, "state_dict")]
    extra = [part for part in run.task.modules() if type(part).get_extra_state is not nn.Module.get_extra_state]
    states += [part.get_extra_state() for part in extra]
    names = {str(name) for state in states if isinstance(state, Mapping) for name in state}
    return {leaf for state in states for leaf in leaves(state)}, names


def code_of(thing: Any) -> Any:
    """Return a function, class or module itself, and the class of anything else."""
    return thing if isinstance(thing, (FunctionType, type, ModuleType)) else type(thing)


def file_of(code: Any) -> str:
    """Return the file of a class, function or module, relative to the project; "" if it is not the owner's."""
    return _file_of_module(code.__name__ if isinstance(code, ModuleType) else code.__module__)


@cache
def _file_of_module(name: str) -> str:
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "/").resolve()
    if not (file.is_file() and file.is_relative_to(PROJECT)) or "site-packages" in file.parts:
        return ""
    inside = file.relative_to(PROJECT)
    return "" if inside.parts[0] in _ENGINE else inside.as_posix()


def leaves(value: Any, depth: int = 0) -> list[str]:
    """Return a checksum of each number, text, array and generator in `value`; for other objects, only their class."""
    if isinstance(value, (Mapping, list, tuple)) and depth < 5:
        items = list(value.values() if isinstance(value, Mapping) else value)
        return [text for item in items[-_MOST:] for text in leaves(item, depth + 1)]
    value = value.get_state() if isinstance(value, torch.Generator) else value
    if isinstance(value, (Tensor, np.ndarray)) and value.nbytes > _LARGE:
        return [f"{id(value)} {getattr(value, '_version', 0)}"]
    if value is None or type(value).__module__.partition(".")[0] in _PLAIN:
        with suppress(Exception):  # what cannot be pickled
            return [f"{zlib.crc32(pickle.dumps(value)):x}"]
    return [type(value).__name__]


def frozen(module: nn.Module) -> bool:
    """Return whether a module has weights of its own, and none of them is trained."""
    weights = list(module.parameters(recurse=False))
    return bool(weights) and not any(weight.requires_grad for weight in weights)
