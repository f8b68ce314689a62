"""Models. Every file named `*_model.py` below this folder is imported, so that its classes are registered."""

from common.config.registry import MODEL_REGISTRY

MODEL_REGISTRY.scan(__name__, "_model")
