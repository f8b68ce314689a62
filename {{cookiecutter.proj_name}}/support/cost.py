"""What a task costs for a batch: floating point operations, memory kept for the backward pass, and time."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.base.context import error_context
from common.base.errors import UserError
from common.optim.precision import Precision
from common.task import Task

_WARM_UP = 3


@dataclass
class Subject:
    """A task and a batch of its training data, both on the device."""

    task: Task
    batch: Any
    size: int
    dtype: str
    precision: Precision
    device: torch.device

    def forward(self) -> None:
        """A forward pass, as in evaluation."""
        self.task.eval()
        with torch.no_grad(), self.precision.autocast():
            self.task(self.task.output, self.batch)

    def train(self, between: Callable[[], None] = lambda: None) -> None:
        """Forward and backward pass of every update of a step; `between` is called between the two."""
        self.task.train()
        for name in self.task.updates():
            with self.precision.autocast():
                losses = self.task(self.task.update, name, self.batch)
            between()
            if "loss" not in losses:
                raise UserError(f"{type(self.task).__name__} has no `loss` in update {name}; see section loss")
            self.precision.backward(losses["loss"])
        self.task.zero_grad()

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def timed(self, call: Callable[[], None], repeat: int) -> list[float]:
        """Seconds of each call, after a few that warm up."""
        seconds = []
        for number in range(_WARM_UP + repeat):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            seconds += [time.perf_counter() - start] if number >= _WARM_UP else []
        return seconds


class ModuleMeter:
    """What each module costs, with all that it contains: measured by hooks around its forward pass.

    Attributes:
        modules: by name; "" is the whole task.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.modules = {name.removeprefix("model."): each for name, each in nn.Module.named_modules(subject.task)}
        self._open: list[tuple[str, Any]] = []  # the modules whose forward pass is under way

    @contextmanager
    def _hooked(self, begin: Callable[[], Any], end: Callable[[str, Any], None]) -> Iterator[None]:
        def before(name: str, *_: Any) -> None:
            self._open.append((name, begin()))

        def after(*_: Any) -> None:
            end(*self._open.pop())

        hooks = [each.register_forward_pre_hook(partial(before, name)) for name, each in self.modules.items()]
        hooks += [each.register_forward_hook(after) for each in self.modules.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def flops(self) -> dict[str, int]:
        """Floating point operations of a forward pass, by module."""
        found = Counter[str]()
        with counting() as counter:
            total = counter.get_total_flops

            def end(name: str, start: int) -> None:
                found[name] += total() - start

            with self._hooked(total, end):
                self.subject.forward()
        return found

    def saved(self) -> dict[str, int]:
        """Bytes of the tensors that a forward pass keeps for its backward pass, without weights; each tensor counts
        once, for the module that keeps it first. Of several updates, the one that keeps most."""
        task = self.subject.task
        weights = {each.untyped_storage().data_ptr() for each in (*task.parameters(), *task.buffers())}
        largest, found, kept = Counter[str](), Counter[str](), dict[int, Tensor]()

        def keep(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in weights and place not in kept:
                kept[place] = tensor  # while it exists, no other tensor has this address
                found.update(dict.fromkeys({name for name, _ in self._open}, tensor.untyped_storage().nbytes()))
            return tensor

        def close() -> None:
            nonlocal largest
            largest = max(largest, found.copy(), key=lambda each: each[""])
            found.clear()
            kept.clear()

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, self._hooked(lambda: None, lambda name, _: None):
            self.subject.train(between=close)
        return largest

    def seconds(self, repeat: int) -> dict[str, float]:
        """Median time of a forward pass, by module. Waiting for the device at each module makes it longer."""
        found: dict[str, list[float]] = defaultdict(list)

        def begin() -> float:
            self.subject.wait()
            return time.perf_counter()

        def end(name: str, start: float) -> None:
            self.subject.wait()
            found[name][-1] += time.perf_counter() - start

        with self._hooked(begin, end):
            for _ in range(_WARM_UP + repeat):
                for name in self.modules:
                    found[name].append(0.0)
                self.subject.forward()
        return {name: median(each[_WARM_UP:]) for name, each in found.items()}


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count floating point operations: 2 for each multiplication and addition of matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it misses fused kernels on CPUs
        yield counter


def measure(subject: Subject, repeat: int) -> dict[str, Any]:
    """What a batch costs. Times are [lower quartile, median, upper quartile] in seconds."""
    with error_context(lambda: f"in analyzing a batch of {subject.size} in {subject.dtype}"):
        with counting() as counter:
            subject.forward()
            forward = counter.get_total_flops()
            subject.train()
        times = {name: subject.timed(getattr(subject, name), repeat) for name in ("forward", "train")}
        peak = None
        if subject.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(subject.device)
            subject.train()
            peak = torch.cuda.max_memory_allocated(subject.device)
    return {
        "batch": subject.size,
        "dtype": subject.dtype,
        "flops_forward": forward,
        "flops_train": counter.get_total_flops() - forward,
        "saved_bytes": ModuleMeter(subject).saved()[""],
        "peak_bytes": peak,
        **{f"seconds_{name}": quantiles(each, n=4, method="inclusive") for name, each in times.items()},
    }


def module_rows(subject: Subject, repeat: int, depth: int) -> list[dict[str, Any]]:
    """What each module costs, down to `depth` levels below the model; without modules that are not used."""
    meter = ModuleMeter(subject)
    flops, saved, seconds = meter.flops(), meter.saved(), meter.seconds(repeat)
    rows = []
    for name, module in meter.modules.items():
        count = sum(each.numel() for each in module.parameters())
        level = 0 if name in ("", "model") else name.count(".") + 1
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # it has no forward pass of its own
        if level <= depth and (count or seconds[name]) and not is_container:
            trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
            row = {"module": name or "task", "type": type(module).__name__, "parameters": count, "trained": trained}
            numbers = {"flops": flops.get(name, 0), "saved_bytes": saved.get(name, 0), "seconds": seconds[name]}
            rows.append({**row, **numbers})
    return rows
