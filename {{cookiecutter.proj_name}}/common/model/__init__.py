"""A model made ready for training on one process or several.

`prepare` fixes the order in which that happens; `freeze` and `blocks` change the model itself, `strategy` exchanges
gradients (DDP) and `fsdp` shares the weights out.
"""

from common.model.config import PrepareConfig
from common.model.prepare import check_patterns, prepare
from common.model.strategy import Strategy

__all__ = ["PrepareConfig", "Strategy", "check_patterns", "prepare"]
