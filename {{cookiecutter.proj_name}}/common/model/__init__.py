"""Prepares a model for training on one process or several.

`prepare` applies all steps in their order, and synchronizes gradients (DDP); `freeze` and `blocks` change the model
itself, and `fsdp` shards the weights.
"""

from common.model.config import PrepareConfig
from common.model.freeze import check_trained, fixed
from common.model.initial import WeightRules, fill_weights
from common.model.prepare import Strategy, check_patterns, prepare

__all__ = [
    "PrepareConfig", "Strategy", "WeightRules", "check_patterns", "check_trained", "fill_weights", "fixed", "prepare",
]  # fmt: skip
