"""Where in the code the parts of a config are that make what differs first: the input is made by the data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.config.registry import (
    COLLATE_REGISTRY,
    DATASET_REGISTRY,
    LOSS_REGISTRY,
    METRIC_REGISTRY,
    MODEL_REGISTRY,
    ORDER_REGISTRY,
    SCHEDULE_REGISTRY,
    TASK_REGISTRY,
    TRANSFORM_REGISTRY,
    Registry,
    file_of,
    import_path,
)
from common.optim.optimizer import optimizer_class
from custom.config import Config

# By what differs first, in the recorder's words: which parts make it, the most direct one first.
_MAKERS = {
    "random": ("task", "model", "plugin", "data"), "input": ("data", "task"), "output": ("model", "task"),
    "loss": ("loss", "task", "model"), "gradient": ("loss", "task", "model", "plugin"),
    "weight": ("optimizer", "schedule", "plugin", "task"), "buffer": ("model", "task", "plugin"),
    "own buffer": ("task", "model", "loss"), "state": ("optimizer", "plugin", "schedule"),
    "value": ("metric", "loss", "task", "model"),
}  # fmt: skip
_ENGINE = ("common/", "torch/", "module ")  # what the owner has not written, or has no source


@dataclass(frozen=True)
class Place:
    """A class or function, and where it is: a file and a line."""

    role: str
    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}  {self.place}"


def places(config: Config, kind: str, name: str) -> list[Place]:
    """Return the owner's parts that make what differs first, the most direct one first.

    Args:
        kind, name: of the first quantity that differs. Of the metrics, the one that is named there counts.
    """
    roles = _MAKERS[kind]
    found = list(dict.fromkeys(part for part in _parts(config) if part.role in roles))
    named = [part for part in found if part.role in ("metric", "loss") and part.name in name.split(".")]
    found = named or [part for part in found if part.role != "metric"]
    return sorted(found, key=lambda part: roles.index(part.role))


def _parts(config: Config) -> Iterator[Place]:
    data = config.dataset.train
    sections: list[tuple[str, Registry, Any]] = [("data", DATASET_REGISTRY, data)]
    sections += [("data", TRANSFORM_REGISTRY, each) for each in data.get("transforms") or ()]
    sections += [("data", COLLATE_REGISTRY, config.loader.collate), ("data", ORDER_REGISTRY, config.loader.order)]
    for role, registry, terms in (("loss", LOSS_REGISTRY, config.loss), ("metric", METRIC_REGISTRY, config.metric)):
        sections += [(role, registry, {"type": name, **(section or {})}) for name, section in (terms or {}).items()]
    sections += [("task", TASK_REGISTRY, config.task), ("model", MODEL_REGISTRY, config.model)]
    sections += [("schedule", SCHEDULE_REGISTRY, config.optim.lr_scheduler.type)]
    for role, registry, section in sections:
        kind = section.get("type") if isinstance(section, Mapping) else section
        if kind is not None:
            yield from _place(role, kind, registry.get(kind))
    yield from _place("optimizer", config.optim.optim_type, optimizer_class(config.optim.optim_type))
    for plugin in config.plugins:
        yield from _place("plugin", plugin, import_path(plugin))


def _place(role: str, name: str, target: Any) -> Iterator[Place]:
    place = file_of(target)
    if not place.startswith(_ENGINE):
        yield Place(role, name, place)
