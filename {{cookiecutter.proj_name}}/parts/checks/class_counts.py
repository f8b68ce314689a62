"""How many samples each class has, as far as a dataset says so without being read."""

from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
from loguru import logger

from common.data.view import is_map_style

_ALL, _FIRST = 6, 3  # classes listed at most; of more, the first ones
_IGNORED = 255  # marks what is ignored, as in most sets of masks, unless there is a class 254


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

    Numbers run from 0 to the largest label; those that mark what is ignored are left out.
    """
    labels = labels_of(dataset)
    if labels is not None:
        is_ignored = (labels == _IGNORED) & (_IGNORED - 1 not in labels)
        labels = labels[(labels >= 0) & ~is_ignored]
    if labels is None or not len(labels) or labels.max() >= len(labels) + 1000:  # not classes but codes
        return {}
    names = list(map(str, getattr(dataset, "classes", ()))) or list(map(str, range(labels.max() + 1)))
    counts = np.bincount(labels, minlength=len(names)).tolist()
    return dict(zip(names, counts, strict=False))


def describe_classes(dataset: Any) -> str:
    """Describe the classes: `classes cat 40, horse 0 (3 files ignored: .heic)`; "" if the labels are not known."""
    counts, ignored = count_classes(dataset), getattr(dataset, "ignored", {})
    lines = [f"{name} {count}{_listing(ignored.get(name))}" for name, count in counts.items()]
    if len(lines) > _ALL:
        several = f"{len(lines)} classes of {min(counts.values())} to {max(counts.values())} samples: "
        return f"{several}{', '.join(lines[:_FIRST])}, ..."
    return f"classes {', '.join(lines)}" if lines else ""


def _listing(suffixes: Counter[str] | None) -> str:
    if not suffixes:
        return ""
    count = sum(suffixes.values())
    kinds = ", ".join(kind or "no suffix" for kind, _ in suffixes.most_common(3))
    return f" ({count} file{'s' * (count > 1)} ignored: {kinds})"


def warn_of_empty_classes(dataset: Any) -> None:
    """Warn of classes without a sample to train on: the model cannot learn them."""
    counts, ignored = count_classes(dataset), getattr(dataset, "ignored", {})
    empty = [name for name, count in counts.items() if not count]
    if not empty:
        return
    shown = ", ".join(f"{name}{_listing(ignored.get(name))}" for name in empty[:_ALL]) + ", ..." * (len(empty) > _ALL)
    remedy = "convert these files, add others, or remove the class"
    if not getattr(dataset, "classes", ()):
        remedy = "labels are counted from 0" if empty == ["0"] else "is a label missing, or are these not classes?"
    logger.warning(
        "dataset.train has no sample of {} of its {} classes: {}; {}", len(empty), len(counts), shown, remedy
    )
