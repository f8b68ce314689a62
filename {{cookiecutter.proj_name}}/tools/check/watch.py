"""A plugin that notes what decides which checks apply, as JSON in the file $CHECK_FACTS.

With CHECK_PLAIN=1, dropout is off, and batch norms that are trained use their running statistics: what is left must not
depend on how the samples of a step are split.
"""

import json
import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from common.data.view import innermost, is_map_style, kind_of


def attach(trainer: Any) -> None:
    """Note it, and make the model plain. Called as a plugin, in each process."""
    modules = dict(trainer.task.named_modules())
    norms = {name: module for name, module in modules.items() if isinstance(module, _NormBase) and not frozen(module)}
    if os.environ.get("CHECK_PLAIN"):
        for module in modules.values():
            if isinstance(module, _DropoutNd) or module in norms.values():
                module.__dict__["train"] = lambda _=True, module=module: nn.Module.train(module, False)
            if isinstance(vars(module).get("dropout"), float):  # attention, recurrent networks
                module.__dict__["dropout"] = 0.0
    data = trainer.stream.dataset
    users = [trainer.task, *(term.function for term in trainer.task.loss.terms)]
    facts = {
        "norms": [f"{type(module).__name__} {name}" for name, module in norms.items()],
        "compares": [type(user).__name__ for user in users if getattr(user, "compares_samples", False)],
        "data": kind_of(data),
        "collates": trainer.config.loader.collate is not None or hasattr(innermost(data), "collate"),
        "in_step": bool(getattr(data, "reads_in_step", False)),
        "shares": not is_map_style(data) and callable(getattr(innermost(data), "share", None)),
    }
    if trainer.rank.is_main:
        Path(os.environ["CHECK_FACTS"]).write_text(json.dumps(facts), encoding="utf-8")


def frozen(module: nn.Module) -> bool:
    """Return whether a module has weights of its own, and none of them is trained."""
    weights = list(module.parameters(recurse=False))
    return bool(weights) and not any(weight.requires_grad for weight in weights)
