"""Torch's own schedulers, driven by the step number and saved as plain values."""

from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from common.base.errors import UserError
from common.optim.arguments import import_class

_DRIVEN = ("lr", "momentum", "betas")  # what torch's schedulers write into a group
_PLAIN = (bool, int, float, str, type(None))


def scheduler_class(path: str) -> type[LRScheduler]:
    """The scheduler class at an import path. Raises `UserError` when there is none."""
    return import_class("type", path, LRScheduler)


class TorchScheduler:
    """A torch scheduler over a stand-in for the optimizer.

    Torch's schedulers compute each rate from the last one in the optimizer, where ours is multiplied by the warm-up and
    replaced when a state is loaded, and they wrap `optimizer.step`. On a stand-in they can do neither harm.
    """

    def __init__(self, optimizer: Optimizer, cls: type[LRScheduler], arguments: dict[str, Any]) -> None:
        self._cls, self._arguments = cls, arguments
        self._defaults = dict(optimizer.defaults)
        self._groups = [{key: group[key] for key in _DRIVEN if key in group} for group in optimizer.param_groups]
        self._follows_metric = issubclass(cls, ReduceLROnPlateau)
        self._start()

    def values(self, step: int) -> list[dict[str, Any]]:
        """What every group holds at step `step`. A step back is computed anew from 0, unless it follows a metric."""
        if not self._follows_metric:
            if step < self._count:
                self._start()
            while self._count < step:
                self._scheduler.step()
                self._count += 1
        return [{key: group[key] for key in _DRIVEN if key in group} for group in self._stand_in.param_groups]

    def after_validation(self, value: float | None) -> None:
        """Hand on the value that ReduceLROnPlateau follows; of no interest to the others."""
        if not self._follows_metric:
            return
        if value is None:
            raise UserError(f"optim.lr_scheduler.type {self._cls.__name__}: this validation gave no value to follow")
        self._scheduler.step(value)  # type: ignore[arg-type]  # this one scheduler takes a metric

    def state_dict(self) -> dict[str, Any]:
        """The step count, what the groups hold, and the scheduler's numbers; what its constructor makes is left out."""
        numbers = {k: v for k, v in self._scheduler.state_dict().items() if _is_plain(v)}
        return {"count": self._count, "groups": self.values(self._count), "scheduler": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises `UserError` when it has another number of parameter groups."""
        if len(state["groups"]) != len(self._groups):
            raise UserError(
                f"the saved schedule has {len(state['groups'])} parameter groups and this model {len(self._groups)}; "
                "start anew from the weights with progress.start_epoch 0"
            )
        self._start()
        self._count = state["count"]
        self._scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self._stand_in.param_groups, state["groups"], strict=True):
            group.update(saved)

    def _start(self) -> None:
        # Torch wants one parameter per group; a group without gradients makes no step.
        groups = [{"params": [torch.zeros(())], **group} for group in self._groups]
        self._stand_in = SGD(groups, lr=1.0)
        self._stand_in.defaults = self._defaults  # CyclicLR and OneCycleLR look here for what momentum is called
        self._count = 0
        try:
            self._scheduler = self._cls(self._stand_in, **self._arguments)
            self._stand_in.step()  # torch warns when a scheduler moves before its optimizer
            if not self._follows_metric:
                self._scheduler.get_last_lr()
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(
                f"optim.lr_scheduler.args: {self._cls.__name__} refuses {self._arguments}: {error}"
            ) from error


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(one) for one in value)
    if type(value) is dict:
        return all(_is_plain(one) for one in value.values())
    return type(value) in _PLAIN
