"""Tasks. Every file named `*_task.py` below this folder is imported, so that its classes are registered."""

from common.config.registry import TASK_REGISTRY

TASK_REGISTRY.scan(__name__, "_task")
