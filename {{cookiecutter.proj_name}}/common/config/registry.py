"""Names in a config -> classes and functions: one flat table per kind, one entry per name, with its file and line."""

import importlib.util
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.base.errors import UserError, error_context
from common.config.arguments import check_arguments, fit_arguments, is_foreign, parameters
from common.config.problem import ABSENT, Problem, shown_path, suggestion

F = TypeVar("F", bound=Callable[..., Any])
Names = Collection[str]


def needs(package: str) -> None:
    """Leave out the file that calls this if a package is not installed. It imports the package where it uses it."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


class Registry:
    """The classes and functions that one kind of section may name.

    Args:
        kind: a word for messages and `--list`, as in "model".
        provided: arguments that the engine supplies; a config must not. An object at an import path gets those that it
            takes.
        call: parameters of an entry that is a function, which is then used directly; a class is always built. None:
            functions are called to build an object, like classes.
    """

    def __init__(self, kind: str, provided: tuple[str, ...] = (), call: tuple[str, ...] | None = None) -> None:
        self.kind, self.provided, self.call = kind, provided, call
        self.left_out: list[str] = []  # files that need a package which is not installed, and which one
        self._to_scan: list[str] = []
        self._broken: list[Problem] = []
        self._where = ""
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str | None = None) -> Callable[[F], F]:
        """Decorator: register a class or function as `name`, by default its own. Using a name twice is an error."""

        def enter(target: F) -> F:
            key = name or target.__name__
            known = self._entries.get(key)
            if known is not None and file_of(known) != file_of(target):  # the same after a second import (`python -m`)
                places = f"{file_of(known)} and {file_of(target)}"
                raise UserError(f"the {self.kind} name {key} is used twice, at {places}; rename one")
            self._entries[key] = target
            return target

        return enter

    def scan(self, package: str) -> None:
        """Look for entries in the package's files `*_<kind>.py`, in folders below it too.

        The files are imported at the first look-up, not now, so a mistake in one is reported like any other.
        """
        self._where = package.replace(".", "/")
        self._to_scan.append(package)

    def import_files(self) -> list[Problem]:
        """Import the files to scan, once. Returns a problem for each that cannot be imported.

        One that only needs a package which is not installed is no problem until something is not found: `left_out`.
        """
        while self._to_scan:
            package = self._to_scan.pop()
            for folder in importlib.import_module(package).__path__:
                for file in sorted(Path(folder).rglob(f"*_{self.kind}.py")):
                    name = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
                    try:
                        importlib.import_module(name)
                    except Exception as error:  # noqa: BLE001 - a user's file can raise anything
                        self._fail(name, file, error)
        return self._broken

    def _fail(self, module: str, file: Path, error: Exception) -> None:
        """Note that the `file` of a module cannot be imported, and drop what it registered before."""
        self._entries = {name: entry for name, entry in self._entries.items() if entry.__module__ != module}
        origin = shown_path(file)
        for step in traceback.extract_tb(error.__traceback__):
            if Path(step.filename) == file:
                origin = f"{shown_path(file)}:{step.lineno}"
        missing = ""
        if isinstance(error, SyntaxError) and error.filename:
            origin = f"{shown_path(error.filename)}:{error.lineno}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            missing = error.name.partition(".")[0]
        if missing and importlib.util.find_spec(missing) is None:  # not a module missing in an installed package
            self.left_out.append(f"{origin} needs {missing}, which is not installed, so the file is skipped")
            return
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        self._broken.append(Problem("", ABSENT, rule, "correct or remove the file", origin))

    def get(self, name: str) -> Callable[..., Any]:
        """Return the entry registered as `name`, or the object at an import path: "pkg.Class" or "pkg.mod:Class"."""
        self.import_files()
        if name in self._entries:
            return self._entries[name]
        if "." in name or ":" in name:
            return import_path(name)
        known = suggestion(name, sorted(self._entries), "known")
        file = f"{self._where}/.../<name>_{self.kind}.py"
        remedy = f"add @{self.kind.upper()}_REGISTRY.register() to a class or function in {file}"
        said = f"there is no {self.kind} called {name}; {known} (for a new one, {remedy})"
        raise UserError("\n      ".join([said, *self.left_out]))

    def build(self, section: str | Mapping[str, Any], *, ignore: Names = (), **provided: Any) -> Any:
        """Call the entry that `section["type"]` names with the other keys, except those in `ignore`, and `provided`.

        A function that is used directly is returned instead, with the other keys bound as arguments. `section` may be
        the name alone.
        """
        if isinstance(section, str):
            section = {"type": section}
        target = self.get(section["type"])
        given = _arguments_of(section, ignore)
        arguments = fit_arguments(target, given)
        if self.call is not None and not isinstance(target, type):
            return partial(target, **arguments) if arguments else target  # it may have attributes
        supplied = self.find_supplied(target, given)
        arguments |= {name: value for name, value in provided.items() if name in supplied}
        with error_context(f"in building the {self.kind} {section['type']}"):
            return target(**arguments)

    def check(
        self, section: Any, key: str, *, ignore: Names = (), default_type: str | None = None, mapped: Names = ()
    ) -> Iterator[Problem]:
        """Problems of a section that names an entry and its arguments; inspects signatures, builds nothing.

        `mapped`: parameters of a directly used function that calls pass by name; (): calls pass `call` by position.
        """
        yield from self.import_files()
        if not isinstance(section, Mapping):
            yield Problem(key, section, f"must be a section: the type of the {self.kind}, and its arguments")
            return
        name = section.get("type", default_type)
        place = key
        if "type" in section or name is None:
            place = f"{key}.type"
        if not isinstance(name, str):
            known = f"one of {', '.join(sorted(self._entries))}"
            yield Problem(place, section.get("type", ABSENT), f"must name a {self.kind}", known)
            return
        try:
            target = self.get(name)
        except UserError as error:
            yield Problem(place, name, str(error))
            return
        given = _arguments_of(section, ignore)
        provided = self.find_supplied(target, given, mapped)
        yield from check_arguments(target, given, key, f"{name} ({file_of(target)})", provided, ignore)

    def entries(self) -> dict[str, Callable[..., Any]]:
        """Return every entry by its name, in alphabetical order."""
        self.import_files()
        return dict(sorted(self._entries.items()))

    def find_supplied(self, target: Callable[..., Any], given: Names = (), mapped: Names = ()) -> tuple[str, ...]:
        """Return the arguments that do not come from the config, which gives the arguments `given`.

        `mapped`: see `check`.
        """
        if self.call is not None and not isinstance(target, type):
            return tuple(mapped) or tuple(parameters(target)[0])[: len(self.call)]
        if target in self._entries.values():
            return self.provided
        named, takes_any = parameters(target)
        taken = set(named)
        if takes_any:  # `**kwargs` are arguments of a base class that has any
            for base in getattr(target, "__mro__", ())[1:]:
                taken.update(parameters(base)[0])
            if len(taken) == len(named) and not is_foreign(target):  # others pass them to what refuses them
                taken.update(self.provided)
        return tuple(name for name in self.provided if name in taken and name not in given)


@dataclass(frozen=True)
class Registered:
    """Marks a field that names an entry: in a section's `type`, or as text. Null means off.

    As in `Annotated[dict[str, Any], Registered(MODEL_REGISTRY)]` or `Annotated[str, Registered(SCHEDULE_REGISTRY)]`.
    `ignore`: keys of the section that are not arguments. They also survive a change of `type`.
    """

    registry: Registry
    ignore: tuple[str, ...] = ()

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        """Problems of the name, or of a section and its arguments; or of each item of a list of them."""
        if isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, str):
                    item = {"type": item}
                yield from self.registry.check(item, f"{key}[{number}]", ignore=self.ignore)
        elif isinstance(value, str):
            yield from self.registry.import_files()
            try:
                self.registry.get(value)
            except UserError as error:
                yield Problem(key, value, str(error))
        elif value is not None:
            yield from self.registry.check(value, key, ignore=self.ignore)


def _arguments_of(section: Mapping[str, Any], ignore: Names) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name != "type" and name not in ignore}


def file_of(target: Any) -> str:
    """Return the place of an object, "custom/models/a_model.py:6"; without a source, its module."""
    try:
        file = inspect.getsourcefile(target) or "?"
        line = inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return f"module {getattr(target, '__module__', '?')}"
    shown = shown_path(file).rpartition("/site-packages/")[2]
    return f"{shown}:{line}"


def import_path(name: str) -> Callable[..., Any]:
    """Import the object at "pkg.module.Class" or "pkg.module:Class".

    Raises `UserError` if there is none, or not callable.
    """
    path = name
    if ":" not in name:
        path = ":".join(name.rsplit(".", 1))
    try:
        target = pkgutil.resolve_name(path)
    except Exception as error:
        said = f"{name} cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and error.name:
            said += f"; {suggestion(error.name, dir(error.obj), 'it has')}"
        raise UserError(said) from error
    if not callable(target):
        raise UserError(f"{name} is {type(target).__name__}, not a class or function")
    return target


MODEL_REGISTRY = Registry("model")
TASK_REGISTRY = Registry("task", provided=("model", "loss", "metric"))
DATASET_REGISTRY = Registry("dataset", provided=("data_dir", "mode"))
LOSS_REGISTRY = Registry("loss", call=("output", "batch"))
METRIC_REGISTRY = Registry("metric")
COLLATE_REGISTRY = Registry("collate", provided=("dataset",), call=("items",))
TRANSFORM_REGISTRY = Registry("transform", call=("value",))
ORDER_REGISTRY = Registry("order", call=("size", "seed", "epoch", "dataset"))
SCHEDULE_REGISTRY = Registry("schedule")
WRITER_REGISTRY = Registry("writer", provided=("run",))
AFTER_SAVE_REGISTRY = Registry("after_save", call=("saved",))
REGISTRIES = (
    TASK_REGISTRY, MODEL_REGISTRY, DATASET_REGISTRY, TRANSFORM_REGISTRY, COLLATE_REGISTRY, ORDER_REGISTRY,
    LOSS_REGISTRY, METRIC_REGISTRY, SCHEDULE_REGISTRY, WRITER_REGISTRY,
    AFTER_SAVE_REGISTRY,
)  # fmt: skip


def scan(*packages: str) -> None:
    """Look for entries of every kind in these packages, in files named `*_model.py`, `*_dataset.py` and so on.

    A package that does not exist is skipped.
    """
    for package in packages:
        if importlib.util.find_spec(package) is not None:
            for registry in REGISTRIES:
                registry.scan(package)


scan("common")
