"""Writers of curves and pictures. Every file named `*_writer.py` below this folder is imported at the first look-up."""

from collections.abc import Mapping
from typing import Any

from common.config.registry import WRITER_REGISTRY

WRITER_REGISTRY.scan(__name__, "_writer")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as one dict with dotted keys: `{"optim.lr": 0.001}`. Lists stay as they are."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
