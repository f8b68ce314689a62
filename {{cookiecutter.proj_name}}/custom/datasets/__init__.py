"""Data sets, transforms and collate functions: files named `*_dataset.py`, `*_transform.py` and `*_collate.py` below
this folder are imported, so that their classes and functions are registered."""

from common.config.registry import COLLATE_REGISTRY, DATASET_REGISTRY, ORDER_REGISTRY, TRANSFORM_REGISTRY

DATASET_REGISTRY.scan(__name__, "_dataset")
TRANSFORM_REGISTRY.scan(__name__, "_transform")
COLLATE_REGISTRY.scan(__name__, "_collate")
ORDER_REGISTRY.scan(__name__, "_order")
