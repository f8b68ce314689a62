"""Losses. Every file named `*_loss.py` below this folder is imported, so that its classes are registered."""

from common.config.registry import LOSS_REGISTRY

LOSS_REGISTRY.scan(__name__, "_loss")
