"""Applies the `transforms` of a dataset's section to each sample that is read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.base.errors import UserError, error_context
from common.config import Problem
from common.config.arguments import is_foreign
from common.config.registry import TRANSFORM_REGISTRY
from common.data.view import View

# Where it is in the config, the function, and the part of a sample that it gets.
Step = tuple[str, Callable[..., Any], str | None]


def problems(transforms: Any, key: str) -> Iterator[Problem]:
    """Yield the problems of the `transforms` at `key` of the configuration."""
    if not isinstance(transforms, list):
        yield Problem(key, transforms, "must be a list of sections: [{type: ..., arguments}, ...]")
        return
    for number, spec in enumerate(transforms):
        yield from TRANSFORM_REGISTRY.check(spec, f"{key}[{number}]", ignore=("key",))
        if isinstance(spec, Mapping) and not isinstance(spec.get("key"), (str, type(None))):
            yield Problem(f"{key}[{number}].key", spec["key"], "must be the name of a field, or null: the whole sample")


def build(dataset: Any, section: Mapping[str, Any], mode: str) -> Any:
    """`dataset` with the transforms of a section."""
    steps: list[Step] = []
    for number, spec in enumerate(section.get("transforms") or ()):
        where = f"dataset.{mode}: transforms[{number}] ({spec['type']})"
        with error_context(f"in {where}"):
            try:
                function = TRANSFORM_REGISTRY.build(spec, ignore=("key",))
            except (TypeError, ValueError) as error:
                if isinstance(error, UserError) or not is_foreign(TRANSFORM_REGISTRY.get(spec["type"])):
                    raise
                raise UserError(f"{spec['type']} rejects its arguments: {error}") from error
        steps.append((where, function, spec.get("key", "image")))
    if steps:
        return Transformed(dataset, steps)
    return dataset


class Transformed(View):
    """A dataset whose samples go through steps when read.

    A sample that is no mapping is given whole, as it is to a step without a key.
    """

    def __init__(self, whole: Any, steps: list[Step]) -> None:
        super().__init__(whole)
        self._steps = steps
        # A dataset that draws nothing need not be seeded, unless a step may draw.
        drawing = any(getattr(function, "random", True) for _, function, _ in steps)
        self.random = drawing or getattr(whole, "random", True)

    def __getitem__(self, index: int) -> Any:
        return self._apply(self.whole[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self._apply, iter(self.whole))

    def _apply(self, sample: Any) -> Any:
        for where, function, key in self._steps:
            try:
                if key is None or not isinstance(sample, Mapping):
                    sample = function(sample)
                elif key in sample:
                    sample = {**sample, key: function(sample[key])}
                else:
                    rule = f"{where}: a sample has no {key!r}, it has {', '.join(map(str, sample))}"
                    raise UserError(f"{rule}; set key to a different field, or to null for the whole sample")
            except UserError:
                raise
            except Exception as error:
                raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        return sample
