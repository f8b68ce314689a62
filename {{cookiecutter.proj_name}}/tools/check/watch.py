"""A plugin that notes what changes in the owner's objects during a run, and what of it no checkpoint holds.

It appends lines of JSON to the file $CHECK_WATCH; `kind` says what a line is about:
  facts    what decides which checks apply
  part     an object of the owner's code: its role in the run, its class, where that is
  module   a file of the owner that was imported
  change   an attribute, variable or default value that changed from one step to the next, and is not saved
  frozen   a module that is not trained, but whose buffers change
With CHECK_PLAIN=1, dropout is off, and batch norms that are trained use their running statistics: what is left must
not depend on how the samples of a step are split.
"""

import json
import os
import pickle
import random
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import getsourcelines
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

Key = tuple[str, str, str, str]
"""Of a value: role, file, class or function, attribute."""
_ENGINE = ("common", "cli", "tools", "train.py", "evaluate.py", "predict.py")
_INSTALLED = tuple({str(Path(each).resolve()) for each in sysconfig.get_paths().values()})
_WALKED = (
    "common.data",
    "common.evaluation",
    "torch.utils.data",
    "torch.nn",
    "torch.optim",
    "torchvision",
    "functools",
)
_PLAIN = ("builtins", "numpy", "torch", "random", "itertools", "collections", "datetime", "pathlib")
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator, Iterator)
_HIDDEN = ("_parameters", "_buffers", "_modules", "param_groups", "defaults", "training", "at")
_MOST, _LARGE = 300, 1 << 23  # items of a container, and bytes of an array, that are looked at


def attach(trainer: Any) -> None:
    """Watch this trainer. Called as a plugin, in each process."""
    modules = dict(trainer.task.named_modules())
    norms = {name: each for name, each in modules.items() if isinstance(each, _NormBase) and not _is_frozen(each)}
    drops = [each for each in modules.values() if isinstance(each, _DropoutNd)]
    if os.environ.get("CHECK_PLAIN"):
        for steady in [*norms.values(), *drops]:
            steady.__dict__["train"] = lambda _=True, module=steady: nn.Module.train(module, False)
        for held in (each.__dict__ for each in modules.values()):  # attention, recurrent networks
            held.update({"dropout": 0.0} if isinstance(held.get("dropout"), float) else {})
    if trainer.rank.is_main:
        watch, data = Watch(trainer), trainer.stream.dataset
        looked_at = [trainer.task, *(term.function for term in trainer.task.loss.terms)]
        watch.note(
            "facts",
            norms=[f"{type(each).__name__} {name}" for name, each in norms.items()],
            compares=[type(each).__name__ for each in looked_at if getattr(each, "compares_samples", False)],
            data=kind_of(data),
            in_step=bool(getattr(data, "reads_in_step", False)),
            shares=not is_map_style(data) and callable(getattr(innermost(data), "share", None)),
        )
        for name in trainer.config.plugins:
            watch.note_part("plugin", import_path(name))
        trainer.monitor.after_step.append(watch.step)


class Watch:
    """Looks at the owner's objects after each step of `trainer`, and notes what it finds."""

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

    def note_part(self, role: str, code: Any) -> None:
        """Note a class or function of the owner."""
        if file := file_of(code):
            with suppress(OSError):  # a class that was made by a call
                self.note("part", role=role, name=code.__qualname__, file=file, line=getsourcelines(code)[1])

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects and functions of the owner that the run holds, with their role."""
        run, seen = self.trainer, set[int]()
        found: list[tuple[str, Any]] = [("plugin", [run.state.user_parts, run.monitor.after_step])]
        found += [("schedule", vars(run.schedule)), ("optimizer", run.optimizer), ("task", self.task)]
        found += [
            ("metric", vars(self.task.metric)),
            ("loss", self.task.loss),
            ("model", self.task.get_submodule("model")),
        ]
        for each in map(vars, (run.stream, *run.val, *run.evaluation)):
            found.append(("data", [each["dataset"], vars(each["_batches"]), each.get("plan")]))
        while found and len(seen) < 20_000:
            role, each = found.pop()
            if id(each) in seen or isinstance(each, (Tensor, np.ndarray, str, type, ModuleType, type(run))):
                continue
            seen.add(id(each))
            kind = each if isinstance(each, FunctionType) else type(each)
            walks = isinstance(each, nn.Module) or str(kind.__module__).startswith(_WALKED)
            if file_of(kind):
                walks = True
                yield role, each
            inner = [getattr(each, name, None) for name in ("__self__", "func")]  # of methods and partial functions
            if isinstance(each, (Mapping, list, tuple, set)):
                inner += list(each.values() if isinstance(each, Mapping) else each)[:_MOST]
            elif walks:
                inner += list(getattr(each, "__dict__", {}).values())
            found += [(role, one) for one in inner if one is not None]

    def values(self) -> Iterator[tuple[Key, Any, int]]:
        """Yield what the owner's objects and code hold, without what the engine saves; the number is the object's."""
        known = set(self.task.modules())
        for role, each in self.objects():
            kind = each if isinstance(each, FunctionType) else type(each)
            for own in kind.__mro__ if isinstance(kind, type) else [kind]:
                self.note_part(role, own)
            buffers = {name: each._buffers[name] for name in getattr(each, "_non_persistent_buffers_set", ())}
            for name, value in {**getattr(each, "__dict__", {}), **buffers}.items():
                if name not in _HIDDEN:
                    parts = value if isinstance(value, (list, tuple)) else [value]
                    alone = [one.state_dict() for one in parts if isinstance(one, nn.Module) and one not in known]
                    yield (role, file_of(kind), kind.__qualname__, name), alone or value, id(each)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and (file := file_of(module)):
                self.note("module", file=file)
                yield from ((*found, 0) for found in _values_of_code(file, "", module))

    def step(self) -> None:
        """Compare the owner's objects with what they were after the step before."""
        with random_state_unchanged():
            modules = dict(self.task.named_modules())
            for name, module in modules.items():
                if _is_frozen(module) and module._buffers and self._has_changed((name,), dict(module._buffers)):
                    above = [name.rsplit(".", dots)[0] for dots in range(name.count(".") + 1)]
                    part = next((each for each in above[1:] if file_of(type(modules[each]))), "")
                    owner = type(modules[part] if part else self.task.get_submodule("model"))
                    about = {"file": file_of(owner), "line": getsourcelines(owner)[1], "type": type(module).__name__}
                    self.note("frozen", name=name, attribute=name.removeprefix(f"{part}.").split(".")[0], **about)
            changed = [(key, value) for key, value, own in self.values() if self._has_changed((*key, own), value)]
            saved = [_saved_by(each) for each in self._saving()] if changed else []
            known, keys = {each for found, _ in saved for each in found}, {key for _, names in saved for key in names}
            for key, value in changed:
                plain = isinstance(value, (bool, int, float))  # whose values occur by chance, too
                if not set(leaves(value)) <= known or (plain and key[3].strip("_") not in keys):
                    about = dict(zip(("role", "file", "name", "attribute"), key, strict=True))
                    self.note("change", **about, steady=not isinstance(value, _GENERATORS))

    def _saving(self) -> list[Any]:
        """The objects whose own state a checkpoint holds."""
        run = self.trainer
        extra = [each for each in self.task.modules() if type(each).get_extra_state is not nn.Module.get_extra_state]
        return [*run.state.user_parts.values(), run.optimizer, run.schedule, innermost(run.stream.dataset), *extra]

    def _has_changed(self, key: tuple[Any, ...], value: Any) -> bool:
        before, self.before[key] = self.before.get(key), leaves(value)
        return before is not None and before != self.before[key]


def file_of(target: Any) -> str:
    """Return the file of a class, function or module, relative to the project; "" if it is not the owner's."""
    module = target if isinstance(target, ModuleType) else sys.modules.get(getattr(target, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "/").resolve()
    if file.suffix != ".py" or not file.is_file() or "site-packages" in file.parts:
        return ""
    if file.is_relative_to(PROJECT):
        return "" if file.relative_to(PROJECT).parts[0] in _ENGINE else file.relative_to(PROJECT).as_posix()
    return "" if str(file).startswith(_INSTALLED) else str(file)


def leaves(value: Any, depth: int = 0) -> list[str]:
    """Return a checksum of each number, text, array and generator in `value`; for other objects, only their class."""
    if isinstance(value, (Mapping, list, tuple)) and depth < 5:
        items = list(value.values() if isinstance(value, Mapping) else value)
        return [text for each in items[-_MOST:] for text in leaves(each, depth + 1)]
    value = value.get_state() if isinstance(value, torch.Generator) else value
    if getattr(value, "nbytes", 0) > _LARGE:
        return [f"{id(value)} {getattr(value, '_version', 0)}"]
    if value is None or type(value).__module__.partition(".")[0] in _PLAIN:
        with suppress(Exception):  # what cannot be pickled
            if isinstance(value, Tensor):
                value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return [f"{zlib.crc32(pickle.dumps(value)):x}"]
    return [type(value).__name__]


def _saved_by(owner: Any) -> tuple[list[str], list[str]]:
    """The leaves of what an object saves itself, and the keys in it."""
    own: Any = getattr(owner, "get_extra_state" if isinstance(owner, nn.Module) else "state_dict", lambda: {})()
    return leaves(own), [str(key) for key in own] if isinstance(own, Mapping) else []


def _values_of_code(file: str, name: str, code: Any) -> Iterator[tuple[Key, Any]]:
    """The variables of a module or class, and what its functions keep: defaults, closures, attributes."""
    for text, value in list(vars(code).items()):
        if isinstance(value, FunctionType) and file_of(value) == file:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            kept = [value.__defaults__, value.__kwdefaults__, cells, vars(value)]
            yield ("module", file, f"{name}{text}", ""), kept
        elif isinstance(value, type) and file_of(value) == file and not name:
            yield from _values_of_code(file, f"{text}.", value)
        elif not (text.startswith("__") or callable(value) or isinstance(value, ModuleType)):
            yield ("module", file, name.removesuffix("."), text), value


def _is_frozen(module: nn.Module) -> bool:
    weights = list(module.parameters(recurse=False))
    return bool(weights) and not any(each.requires_grad for each in weights)
