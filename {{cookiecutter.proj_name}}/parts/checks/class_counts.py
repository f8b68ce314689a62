"""How many samples each class has, as far as a dataset says so without being read."""

from contextlib import suppress
from typing import Any

import numpy as np
from loguru import logger

from common.config.problem import join_names
from common.data.view import is_map_style

_ALL, _FIRST = 6, 3  # classes listed at most; of more, the first ones


def labels_of(dataset: Any) -> np.ndarray[Any, Any] | None:
    """Return each sample's class, (samples,), from the dataset's attribute `targets` or `labels`; None without one.

    Not their methods, which may read every file.
    """
    for name in ("targets", "labels"):
        with suppress(Exception):  # a dataset may use these names for something else
            labels = np.asarray(getattr(dataset, name))
            whole = len(getattr(dataset, "whole", dataset))
            if is_map_style(dataset) and labels.shape == (whole,) and labels.dtype.kind in "iu":
                return labels[: len(dataset)]
    return None


def count_classes(dataset: Any) -> dict[str, int]:
    """Samples of each class by name, or by number if the dataset names none; empty if the labels are not known.

    Numbers run from 0 to the largest label; negative ones, which mark what is ignored, are left out.
    """
    labels = labels_of(dataset)
    if labels is None:
        return {}
    labels = labels[labels >= 0]
    if not len(labels) or labels.max() >= len(labels) + 1000:  # not classes but codes
        return {}
    names = getattr(dataset, "classes", None)
    if names is None or not len(names):
        names = range(labels.max() + 1)
    counts = np.bincount(labels, minlength=len(names)).tolist()
    return dict(zip(map(str, names), counts, strict=False))


def log_classes(name: str, dataset: Any) -> None:
    """Log the classes of a set, such as `cat 40, horse 0`; warn of training without a class.

    Args:
        name: of the set, such as train.
    """
    counts = count_classes(dataset)
    if not counts:
        return
    lines = []
    empty = []
    for label, count in counts.items():
        lines.append(f"{label} {count}")
        if count == 0:
            empty.append(label)
    text = f"classes {', '.join(lines)}"
    if len(lines) > _ALL:
        first = ", ".join(lines[:_FIRST])
        text = f"{len(lines)} classes of {min(counts.values())} to {max(counts.values())} samples: {first}, ..."
    logger.info("{} data: {}", name, text)
    if name == "train" and empty:
        which = f"{join_names(empty, 5)}; add some, or remove the class; labels are counted from 0"
        logger.warning("dataset.train lacks {} of {} classes: {}", len(empty), len(lines), which)
