"""Datasets of single files, for predictions and exports."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from common.base.errors import UserError
from common.config.arguments import fit_arguments
from common.config.registry import DATASET_REGISTRY
from common.data.sections import OWN, apply_transforms


def reader_of(section: Mapping[str, Any]) -> Any:
    """Return the class that reads files for a section; of datasets in each other, that of the first one inside."""
    inner = section.get("set") or next(iter(section.get("sets") or ()), None)
    return reader_of(inner) if isinstance(inner, Mapping) else DATASET_REGISTRY.get(section["type"])


def build_files(section: Mapping[str, Any], mode: str, files: Sequence[Any]) -> Any:
    """Build a dataset of these files, without labels, prepared as the samples of a section are.

    The class of the dataset makes it: `from_files(files, **arguments)`, where the arguments are the section's, and the
    defaults of the class. Sample i is that of file i.

    Raises:
        UserError: the class has no `from_files`.
    """
    kind = DATASET_REGISTRY.get(section["type"])
    if not callable(make := getattr(kind, "from_files", None)):
        raise UserError(
            f"dataset.{mode}: {section['type']} cannot read single files; give the class a method from_files, "
            f'or name another dataset: --dataset.{mode} "{{type: ImageFiles, size: [32, 32]}}"'
        )
    given = {name: value for name, value in section.items() if name not in ("type", "transforms", *OWN)}
    defaults = {parameter.name: parameter.default for parameter in inspect.signature(kind).parameters.values()}
    defaults = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    return apply_transforms(make(files, **defaults | fit_arguments(kind, given)), section, mode)
