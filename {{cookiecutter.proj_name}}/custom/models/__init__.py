"""Models. Every file named `*_model.py` below this folder is imported, so that its registrations are known."""

from common.config.registry import MODEL_REGISTRY

MODEL_REGISTRY.scan(__name__, "_model")
