"""Losses. Every file named `*_loss.py` below this folder is imported, so that its registrations are known."""

from common.config.registry import LOSS_REGISTRY

LOSS_REGISTRY.scan(__name__, "_loss")
