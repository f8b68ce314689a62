"""Clipping by what was usual so far (Seetharaman et al., AutoClip, 2020)."""

from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.trainer import Trainer


class AutoClip:
    """Limits the norm of gradients to the median of all norms so far."""

    def __init__(self, trainer: Trainer) -> None:
        self.norms: list[float] = []
        trainer.optimizer.register_step_pre_hook(self.clip)

    def clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip the gradients of the weights of `optimizer`."""
        weights = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        norm = get_total_norm([each.grad for each in weights])
        self.norms.append(float(norm))
        clip_grads_with_norm_(weights, sorted(self.norms)[len(self.norms) // 2], norm)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = list(state["norms"])


def attach(trainer: Trainer) -> None:
    """Clip the gradients of a run; a plugin."""
    trainer.state.register("auto_clip", AutoClip(trainer))
