"""The parts of a run, by name: the contents of a checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loguru import logger
from torch import nn

from common.base.errors import UserError
from common.checkpoint.file import FORMAT
from common.checkpoint.weights import load_weights
from common.distributed import Rank, gather_objects
from common.distributed.seed import mix, random_state, set_random_state, set_seed
from common.optim import averaged_state_dict
from common.progress import Position


class Stateful(Protocol):
    """Something that can be saved: its state is tensors, numbers, strings, and lists, tuples and dicts of these."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def task_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """All tensors of the task in a checkpoint."""
    return {**state["model"], **state.get("task", {})}


@dataclass
class RunState:
    """Collects the parts of a run into one mapping, and restores them from one. Any other state is lost.

    Attributes:
        task: without wrappers, so names have no prefix. The tensors of its `model` are saved as `model`, all others as
            `task`; until they had a place of their own, those of losses were saved as the model's too.
        parts: everything else that is saved, by name.
        fingerprint: see `common.checkpoint.guarantee`.
        about: plain values (the config) stored in a checkpoint.
        user_parts: parts that plugins registered.
    """

    task: nn.Module
    parts: dict[str, Stateful]
    rank: Rank
    fingerprint: Mapping[str, Any]
    about: Mapping[str, Any]
    user_parts: dict[str, Stateful] = field(default_factory=dict)

    def register(self, name: str, part: Stateful) -> None:
        """Save `part` with the run. Raises `UserError` if the name is taken."""
        if name in self.user_parts:
            raise UserError(f"register_state: {name} is registered twice; give one of them another name")
        self.user_parts[name] = part

    def state_dict(self, at: Position, values: Mapping[str, float], owed: Collection[str] = ()) -> dict[str, Any]:
        """The state of a run at position `at` that measured `values` last. Every process must call this.

        Args:
            owed: the splits whose evaluation at `at` was interrupted by a signal.
        """
        mine = random_state(self.rank.device)
        tensors = self.task.state_dict()
        model = {name: tensors.pop(name) for name in self.task.get_submodule("model").state_dict()}
        state = {
            "format": FORMAT,
            "position": at._asdict(),
            "values": dict(values),
            "owed": sorted(owed),
            "model": model,
            "task": tensors,
            **{name: part.state_dict() for name, part in self.parts.items()},
            "user": {name: part.state_dict() for name, part in self.user_parts.items()},
            "random": gather_objects(mine, self.rank),
            "fingerprint": dict(self.fingerprint),
            "about": {**self.about, "classes": [str(name) for name in getattr(self.task, "classes", ())]},
        }
        set_random_state(mine, self.rank.device)  # a part's state_dict may have drawn random numbers
        return state

    def load_weights(self, state: Mapping[str, Any], source: Path) -> None:
        """Load only the weights: the averaged ones if the checkpoint has them."""
        load_weights(self.task, averaged_state_dict(task_state(state), state["ema"]), str(source))

    def load_state_dict(self, state: Mapping[str, Any], source: Path) -> tuple[Position, dict[str, float], set[str]]:
        """Restore everything; the random streams last, since nothing may draw from them afterwards.

        Returns:
            The position of the run, its last measured values, and the splits whose evaluation is pending there.

        Raises:
            UserError: the weights are another model's, or a part is missing.
        """
        load_weights(self.task, task_state(state), str(source))
        if missing := {*(self.parts.keys() - state.keys()), *(self.user_parts.keys() - state["user"].keys())}:
            raise UserError(
                f"{source} has no state of {', '.join(sorted(missing))}; only its weights can be used, not its state"
            )
        if extra := state["user"].keys() - self.user_parts.keys():
            logger.warning("{} has state of {}, which nothing in this run registers", source, ", ".join(sorted(extra)))
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for name, part in self.user_parts.items():
            part.load_state_dict(state["user"][name])
        at = Position(**state["position"])
        streams = state["random"]
        if len(streams) == self.rank.world_size:
            set_random_state(streams[self.rank.rank], self.rank.device)
        else:
            set_seed(mix(self.fingerprint["seed"], self.rank.rank, at.step))
        return at, dict(state["values"]), set(state["owed"])
