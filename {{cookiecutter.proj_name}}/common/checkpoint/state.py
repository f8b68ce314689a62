"""The parts of a run, by name: the contents of a checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loguru import logger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from common.base.errors import UserError
from common.base.nested import map_leaves
from common.checkpoint.checksum import state_checksum
from common.checkpoint.file import FORMAT
from common.checkpoint.layout import Frozen, Layout, check_frozen, fit_buffers
from common.checkpoint.weights import averaged_state_dict, load_weights
from common.config.problem import join_names
from common.distributed import Rank, gather_objects, gather_to_main, own_buffers
from common.distributed.buffers import named_buffers
from common.distributed.collectives import whole
from common.distributed.seed import mix, random_state, set_random_state, set_seed
from common.progress import Position

_DATA = "data"  # may differ between processes: a dataset can count what it has read


class Stateful(Protocol):
    """Something that can be saved: its state is tensors, numbers, strings, and lists, tuples and dicts of these."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def load_task(
    task: nn.Module, state: Mapping[str, Any], source: Path, *, average: bool = True, empty: Collection[str] = ()
) -> None:
    """Load the task's tensors in a checkpoint: those of its `model` and all others. Every process must call this.

    Frozen tensors that the checkpoint leaves out must be those of their source in `task`.

    Args:
        average: load averages, where the checkpoint has them and uses them.
        empty: see `fit_buffers`.

    Raises:
        UserError: the weights are another model's, or a frozen tensor has changed.
    """
    weights = {**state["model"], **state["task"]}  # together: older files have the tensors of losses in `model`
    left_out = state["frozen"]
    fit_buffers(task, weights, empty)
    if average:
        weights = averaged_state_dict(weights, state)
    load_weights(task, weights, str(source), left_out)
    check_frozen(task, left_out, str(source))


@dataclass
class RunState:
    """Collects the parts of a run into one mapping, and restores them from one. Any other state is lost.

    Attributes:
        task: without wrappers, so names have no prefix. The tensors of its `model` are saved as `model`, all others as
            `task`.
        states: everything else that is saved, by name.
        fingerprint: see `common.checkpoint.resume`.
        about: plain values (the config) stored in a checkpoint.
        keep_frozen: save tensors that training never changes, too.
        user_states: parts that plugins registered.
    """

    task: nn.Module
    states: dict[str, Stateful]
    rank: Rank
    fingerprint: Mapping[str, Any]
    about: Mapping[str, Any]
    keep_frozen: bool = True
    user_states: dict[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._frozen = Frozen(self.task, kept=self.keep_frozen)
        self.layout = Layout(self.task)
        self._warned = False
        self._draws_alike = self.about["config"]["dist"].get("reduction") == "fixed"

    def register(self, name: str, part: Stateful) -> None:
        """Save `part` with the run, for each rank if ranks differ. Raises `UserError` if the name is taken."""
        if name in self.user_states or name == _DATA:
            raise UserError(f"register_state: the name {name} is taken; choose another")
        self.user_states[name] = part

    def state_dict(self, at: Position, values: Mapping[str, float], pending: Collection[str] = ()) -> dict[str, Any]:
        """Return the state of a run at position `at` that measured `values` last. Every process must call this.

        Args:
            pending: the splits whose evaluation at `at` was interrupted by a signal.

        Raises:
            UserError: a freshly built task could not load it.
        """
        self.layout.check()
        mine = random_state(self.rank.device)
        tensors = self.task.state_dict()
        frozen = self._frozen.to_leave_out()
        of_model = self.task.get_submodule("model").state_dict()
        model = {name: tensors.pop(name) for name in of_model}  # what stays in `tensors` is the rest of the task
        parts = {name: part.state_dict() for name, part in self.states.items()}
        user = {name: part.state_dict() for name, part in self.user_states.items()}
        state = {
            "format": FORMAT,
            "position": at._asdict(),
            "values": dict(values),
            "owed": sorted(pending),  # this name in files only
            "model": {name: value for name, value in model.items() if name not in frozen},
            "task": {name: value for name, value in tensors.items() if name not in frozen},
            "frozen": frozen,
            **parts,
            "user": user,
            "ranks": self._state_of_ranks({**user, _DATA: parts.get(_DATA, {})}),
            "differing": self.differing_buffers(),
            "unsaved": self.layout.lost_buffers(),
            # With dist.reduction fixed, all ranks have the same, and each step seeds its own.
            "random": gather_to_main(mine, self.rank)[: 1 if self._draws_alike else None],
            "fingerprint": dict(self.fingerprint),
            "about": {**self.about, "classes": [str(name) for name in getattr(self.task, "classes", ())]},
        }
        set_random_state(mine, self.rank.device)  # a part's state_dict may have drawn random numbers
        return state

    def differing_buffers(self) -> list[str]:
        """Return the names of buffers that differ between ranks though they are not declared so; warns of them once.

        Statistics of norms may differ: only rank 0's are ever used. Every process must call this.
        """
        own = own_buffers(self.task)
        undeclared = {
            name: buffer
            for name, module, _, buffer in named_buffers(self.task)
            if name not in own and not isinstance(module, _NormBase)
        }
        names = self._differing(undeclared) if undeclared else []
        if names and not self._warned:
            self._warned = True
            logger.warning(
                "buffers that differ between the processes: {}. Checkpoints and evaluations take rank 0's, and so does "
                "each step, unless dist.broadcast_buffers is false: what the other processes added is lost. Exchange "
                "them in after_step, or declare them in {}.own_buffers; see docs/task.md",
                *(join_names(names), type(self.task).__name__),
            )
        return names

    def load_state_dict(
        self, state: Mapping[str, Any], source: Path, only: Collection[str] = ()
    ) -> tuple[Position, dict[str, float], set[str]]:
        """Restore everything; the random generators last, since nothing may draw from them afterwards.

        `only`: besides the task, these parts alone.

        Returns:
            The position of the run, its last measured values, and the splits whose evaluation is pending there.

        Raises:
            UserError: the weights are another model's, a part is missing, or was saved for each of more or fewer ranks.
        """
        load_task(self.task, state, source, average=False, empty=self.layout.empty)
        mine = self._mine(state, source)
        state = {**state, _DATA: mine["user"].get(_DATA, state.get(_DATA, {}))}
        user = {**state["user"], **mine["user"]}
        user.pop(_DATA, None)
        new = {name for name, part in self.states.items() if getattr(part, "may_be_new", False)}
        missing = (self.states.keys() - state.keys() - new) | (self.user_states.keys() - user.keys())
        if missing:
            raise UserError(
                f"{source} has no state of {', '.join(sorted(missing))}; only its weights can be used, not its state"
            )
        if extra := user.keys() - self.user_states.keys():
            logger.warning("{} has state of {}, which nothing in this run registers", source, ", ".join(sorted(extra)))
        for name, _, _, buffer in named_buffers(self.task):
            if name in mine["buffers"]:
                buffer.detach().copy_(mine["buffers"][name])
        at = Position(**state["position"])
        for name, part in self.states.items():
            if not only or name in only:
                part.load_state_dict(state.get(name, {}))
        if only:
            return at, {}, set()
        for name, part in self.user_states.items():
            part.load_state_dict(user[name])
        random = state["random"]
        if len(random) == self.rank.world_size:
            set_random_state(random[self.rank.rank], self.rank.device)
        else:
            set_seed(mix(self.fingerprint["seed"], self.rank.rank, at.step))
        return at, dict(state["values"]), set(state["owed"])

    def _state_of_ranks(self, user: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Gather the state of every rank on the main process, in rank order: its own buffers, user parts that differ.

        Empty if there is nothing of that kind.
        """
        own = own_buffers(self.task)
        buffers = {}
        for name, module, leaf, buffer in named_buffers(self.task):
            if name in own and leaf not in module._non_persistent_buffers_set:
                buffers[name] = buffer
        names = self._differing(user)
        if not (names or buffers):
            return []
        state = {"buffers": buffers, "user": {name: user[name] for name in names if name in user}}
        # Rank 0's own are not copies: in the file they are the same tensors as in the other parts.
        return [state, *gather_to_main(map_leaves(state, _in_host_memory), self.rank)[1:]]

    def _differing(self, parts: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts that are not on every rank what they are on rank 0.

        Every process must call this.
        """
        if self.rank.is_single_process:
            return []
        first, *others = gather_objects({name: state_checksum(part) for name, part in parts.items()}, self.rank)
        return sorted({name for other in others for name in {**first, **other} if first.get(name) != other.get(name)})

    def _mine(self, state: Mapping[str, Any], source: Path) -> dict[str, Any]:
        """Return the part of the checkpoint that belongs to this rank only."""
        ranks = state.get("ranks") or []
        if ranks and len(ranks) != self.rank.world_size:
            names = sorted({name for state in ranks for part in state.values() for name in part})
            raise UserError(
                f"{source} holds a state of its own for each of {len(ranks)} processes ({join_names(names)}), but this "
                f"run has {self.rank.world_size}: use {len(ranks)} processes, or start a new run from the weights: "
                "--progress.start_epoch 0 --name NEW"
            )
        return ranks[self.rank.rank] if ranks else {"buffers": {}, "user": {}}


def _in_host_memory(value: Any, path: tuple[Any, ...]) -> Any:
    return whole(value).detach().cpu() if isinstance(value, Tensor) else value
