"""Data sets. Every file named `*_dataset.py` below this folder is imported, so that its classes are registered."""

from common.config.registry import COLLATE_REGISTRY, DATASET_REGISTRY, ORDER_REGISTRY

DATASET_REGISTRY.scan(__name__, "_dataset")
COLLATE_REGISTRY.scan(__name__, "_collate")
ORDER_REGISTRY.scan(__name__, "_order")
