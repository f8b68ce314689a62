"""Metrics. Every file named `*_metric.py` below this folder is imported, so that its classes are registered."""

from common.config.registry import METRIC_REGISTRY

METRIC_REGISTRY.scan(__name__, "_metric")
