"""The parts of a run, by name: the contents of a checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from common.base.errors import UserError
from common.base.nested import map_leaves
from common.base.parts import AVERAGE, required
from common.checkpoint.checksum import state_checksum
from common.checkpoint.file import FORMAT, State
from common.checkpoint.layout import Layout
from common.checkpoint.weights import averaged_state_dict, load_weights
from common.config.problem import join_names
from common.distributed import Rank, gather_objects, gather_to_main, own_buffers
from common.distributed.buffers import named_buffers
from common.distributed.collectives import whole
from common.distributed.seed import mix, random_state, set_random_state, set_seed
from common.progress import Position

_DATA = "data"  # may differ between processes: a dataset can count what it has read


def load_state(task: nn.Module, state: State, source: Path) -> None:
    """Load the task's tensors in a checkpoint: those of its `model`, averaged if it has averages, and all others.

    Frozen tensors that the checkpoint leaves out must be those of their source in `task`. Every process must call this.

    Raises:
        UserError: the weights are another model's, or a frozen tensor has changed.
    """
    weights = {**state["model"], **state["task"]}
    left_out = state["frozen"]
    load_weights(task, averaged_state_dict(weights, state), str(source), left_out)
    if left_out:
        frozen = required("frozen", "tensors", f"{source} leaves out frozen tensors: to load it")
        frozen.check_frozen(task, left_out, str(source))  # every process


@dataclass
class RunState:
    """Collects the parts of a run into one mapping, and restores them from one. Any other state is lost.

    Attributes:
        task: without wrappers, so names have no prefix. The tensors of its `model` are saved as `model`, all others as
            `task`.
        states: everything else that is saved, by name: objects with `state_dict` and `load_state_dict`. States are
            tensors, numbers, strings, and lists, tuples and dicts of these.
        fingerprint: see `common.checkpoint.resume`.
        about: plain values (the config) stored in a checkpoint.
        user_states: parts that plugins registered.
    """

    task: nn.Module
    states: dict[str, Any]
    rank: Rank
    fingerprint: State
    about: State
    user_states: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.about["config"]
        self._frozen: Any = None
        if not config["checkpoint"].get("frozen", True):
            self._frozen = required("frozen", "tensors", "checkpoint.frozen").Frozen(self.task)
        self.layout = Layout(self.task)
        self._warned = False
        self._draws_alike = config["dist"].get("reduction") == "fixed"

    def register(self, name: str, part: Any) -> None:
        """Save `part` with the run, for plugins; each rank's if they differ. Raises `UserError` for a taken name."""
        if name in self.user_states or name == _DATA:  # saved like `user`, since it may differ between processes too
            raise UserError(f"state.register: the name {name} is taken; choose another")
        self.user_states[name] = part

    def state_dict(self, at: Position, values: Mapping[str, float], pending: Collection[str] = ()) -> dict[str, Any]:
        """Return the state of a run at position `at` that measured `values` last. Every process must call this.

        Args:
            pending: the splits whose evaluation at `at` was interrupted by a signal.

        Raises:
            UserError: a freshly built task could not load it.
        """
        self.layout.check()
        own_random = random_state(self.rank.device)
        frozen = {}
        if self._frozen is not None:
            frozen = self._frozen.to_leave_out()  # every process
        task = {name: value for name, value in self.task.state_dict().items() if name not in frozen}
        of_model = self.task.get_submodule("model").state_dict()
        model = {name: task.pop(name) for name in of_model if name in task}
        states = {name: each.state_dict() for name, each in self.states.items()}
        user = {name: each.state_dict() for name, each in self.user_states.items()}
        random = gather_to_main(own_random, self.rank)  # every process
        if self._draws_alike:  # with dist.reduction fixed, all ranks have the same, and each step seeds its own
            random = random[:1]
        classes = getattr(self.task, "classes", ())
        state = {
            "format": FORMAT,
            "position": at._asdict(),
            "values": dict(values),
            "owed": sorted(pending),  # the name of `pending` in files
            "model": model,
            "task": task,
            "frozen": frozen,
            **states,
            "user": user,
            "ranks": self._state_of_ranks({**user, _DATA: states[_DATA]}),
            "differing": self.differing_buffers(),
            "unsaved": self.layout.lost_tensors(),
            "random": random,
            "fingerprint": dict(self.fingerprint),
            "about": {**self.about, "classes": [str(name) for name in classes]},
        }
        set_random_state(own_random, self.rank.device)  # a state_dict may have drawn random numbers
        return state

    def differing_buffers(self) -> list[str]:
        """Return the names of buffers that differ between ranks though they are not declared so; warns of them once.

        Statistics of norms may differ: only rank 0's are ever used. Every process must call this.
        """
        own = own_buffers(self.task)
        undeclared = {}
        for name, module, _, buffer in named_buffers(self.task):
            if buffer is not None and name not in own and not isinstance(module, _NormBase):
                undeclared[name] = buffer
        names = self._differing(undeclared)
        if names and not self._warned:
            self._warned = True
            logger.warning(
                "buffers that differ between the processes: {}. Checkpoints and evaluations take rank 0's, and so does "
                "each step, unless dist.broadcast_buffers is false: what the other processes added is lost. Exchange "
                "them in after_step, or declare them in {}.own_buffers; see docs/task.md",
                join_names(names),
                type(self.task).__name__,
            )
        return names

    def load_tensors(self, state: State, source: Path) -> dict[str, Any]:
        """Restore the task, and the buffers of which each process has its own. Every process must call this.

        Returns:
            The states by name; those of plugins below `user`. Of what differs between processes, those of this one.

        Raises:
            UserError: the weights are another model's, or were saved for each of more or fewer processes.
        """
        load_state(self.task, {**state, AVERAGE: {}}, source)  # the trained weights, not their average
        user = dict(state["user"])
        ranks = state["ranks"]
        if ranks:
            if len(ranks) != self.rank.world_size:
                names = join_names([*ranks[0]["buffers"], *ranks[0]["user"]])
                raise UserError(
                    f"{source} holds a state of its own for each of {len(ranks)} processes ({names}), "
                    f"but this run has {self.rank.world_size}: use {len(ranks)} processes, or start a new run from the "
                    "weights: --init_from.path FILE --name NEW"
                )
            mine = ranks[self.rank.rank]
            user |= mine["user"]
            own = self.task.state_dict()
            for name, value in mine["buffers"].items():
                own[name].copy_(value)
        states = {**state, "user": user}
        if _DATA in user:  # it differed between ranks
            states[_DATA] = user.pop(_DATA)
        return states

    def load_state_dict(self, state: State, source: Path) -> tuple[Position, dict[str, float], set[str]]:
        """Restore everything; the random generators last, since nothing may draw from them afterwards.

        Returns:
            The position of the run, its last measured values, and the splits whose evaluation is pending there.

        Raises:
            UserError: as `load_tensors`; or something has no state in the checkpoint.
        """
        states = self.load_tensors(state, source)
        user = states["user"]
        missing = self.user_states.keys() - user.keys()
        for name, each in self.states.items():
            if name not in states and not getattr(each, "may_be_new", False):
                missing.add(name)
        if missing:
            names = ", ".join(sorted(missing))
            raise UserError(f"{source} has no state of {names}; only its weights can be used, not its state")
        at = Position(**state["position"])
        for name, each in self.states.items():
            each.load_state_dict(states.get(name, {}))
        for name, each in self.user_states.items():
            each.load_state_dict(user[name])
        random = state["random"]
        if len(random) == self.rank.world_size:
            set_random_state(random[self.rank.rank], self.rank.device)
        else:
            # Another number of processes: new draws, which the log does not call bit-exact.
            set_seed(mix(self.fingerprint["seed"], self.rank.rank, at.step))
        return at, dict(state["values"]), set(state["owed"])

    def _state_of_ranks(self, user: State) -> list[dict[str, Any]]:
        """Gather the state of every rank on the main process, in rank order: its own buffers, user parts that differ.

        Empty if there is nothing of that kind.
        """
        own = own_buffers(self.task)
        buffers = {name: value for name, value in self.task.state_dict().items() if name in own}
        differing = {name: user[name] for name in self._differing(user) if name in user}
        if not (differing or buffers):
            return []
        mine = map_leaves({"buffers": buffers, "user": differing}, _in_host_memory)
        return gather_to_main(mine, self.rank)  # every process

    def _differing(self, states: State) -> list[str]:
        """Return the names of the states that are not on every rank what they are on rank 0.

        Every process must call this.
        """
        if self.rank.is_single_process or not states:
            return []
        checksums = {name: state_checksum(state) for name, state in states.items()}
        everywhere = gather_objects(checksums, self.rank)
        names = set()
        for other in everywhere[1:]:
            for name, _ in everywhere[0].items() ^ other.items():
                names.add(name)
        return sorted(names)


def _in_host_memory(value: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(value, Tensor):
        return whole(value).detach().cpu()  # every process
    return value
