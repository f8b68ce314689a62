"""Prepares a model for training on one process or several.

`prepare` applies all steps in their order, `freeze` keeps weights as they are, `strategy` synchronizes gradients (DDP).
"""

from common.model.freeze import check_trained, fixed
from common.model.prepare import PrepareConfig, check_patterns, prepare
from common.model.strategy import Strategy
