"""A plugin for train.py that writes a digest of every tensor of a training step to `$RECORD_DIR/rank<k>.jsonl`:
PYTHONPATH=tools/record RECORD_DIR=/tmp/record python train.py --config FILE --plugins '[recorder.attach]'

A line per tensor, in the order of events: step, kind, name, type, digest of its bytes, norm, and a sketch, from which
the distance of two tensors is estimated. At the start of a run or resume, weights, buffers and optimizer states are
those of the step before; later ones are those after the step. The second tensor of a name in a step has the name
`name#2`. With RECORD_STEP=12, step 12 also has the output of each module and its gradient. With
RECORD_SIGNAL=SIGKILL@7, each process sends itself this signal after its first optimizer step of step 7.

It needs only torch, and its global hooks, so that it records earlier commits of a project too. Parts of a model that
are compiled are not recorded; what they compute is seen in the loss and the gradients.
"""

import functools
import hashlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

SKETCH = 8  # signed sums per tensor
_COLUMNS = 1024 * SKETCH


def attach(trainer: Any) -> None:
    """Record the steps of this process, as the environment says. Called by the trainer as a plugin."""
    recorder = Recorder(trainer)
    nn.modules.module.register_module_forward_pre_hook(recorder.before_forward)
    nn.modules.module.register_module_forward_hook(recorder.after_forward, with_kwargs=True)
    register_optimizer_step_post_hook(recorder.after_update)
    setattr(torch.autograd, "backward", recorder.backward)  # noqa: B010 - for the type checker


class Recorder:
    """Writes the records of one process, an update at a time: a killed process leaves whole lines."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.task, folder = trainer, trainer.task, Path(os.environ["RECORD_DIR"])
        self.detailed_step = int(os.environ.get("RECORD_STEP") or -1)
        self.signal, _, self.signal_step = os.environ.get("RECORD_SIGNAL", "").partition("@")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank{rank}.jsonl").open("ab", buffering=0)
        self.file.write(b"\n")  # ends a line that was cut off
        self.step, self.depth, self.plain_backward, self.in_backward = -1, 0, torch.autograd.backward, False
        self.rows: list[dict[str, Any]] = []
        self.names: dict[nn.Module, str] = {}
        self.weights: list[tuple[str, Tensor]] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Record what enters a module that no other one calls."""
        if torch.compiler.is_compiling() or not self.is_training():
            return
        self.begin_step()
        if module in self.names:
            self.depth += 1
            if self.depth == 1:
                self.add_inputs(self.names[module], dict(enumerate(inputs)))
                self.entered = len(self.rows)

    def after_forward(self, module: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        """Record the inputs given by name, and the output and its gradient if the step is recorded in detail."""
        if torch.compiler.is_compiling() or not self.is_training() or module not in self.names:
            return
        self.depth -= 1
        if not self.depth:
            inside, self.rows = self.rows[self.entered :], self.rows[: self.entered]
            self.add_inputs(self.names[module], named)
            self.rows += inside
        for name, tensor in tensors(output, self.names[module]) if self.step == self.detailed_step else ():
            self.add("output", name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self.add, "gradient", name))

    def backward(self, losses: Any, *arguments: Any, **options: Any) -> None:
        """Record the losses that `torch.autograd.backward` is called on, and call it."""
        if self.is_training():
            self.begin_step()
            for _, loss in tensors(losses, ""):
                self.add("loss", "loss", loss)
        outer, self.in_backward = self.in_backward, True
        try:
            self.plain_backward(losses, *arguments, **options)
        finally:
            self.in_backward = outer

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record gradients and what the update changed, write it, and send the signal if it is due."""
        self.begin_step()
        for name, weight in self.weights:
            if weight.grad is not None:
                self.add("gradient", name, weight.grad)
        self.add_state(optimizer)
        self.write()
        if str(self.step) == self.signal_step:
            self.signal_step = ""
            os.kill(os.getpid(), Signals[self.signal])

    def is_training(self) -> bool:
        """Whether this is in a training step; in a backward pass, modules compute again what they did before."""
        return bool(self.task.training) and not self.in_backward

    def begin_step(self) -> None:
        """At the first event of a step: write the last one, and record the random generators."""
        if (step := self.trainer.at.step + 1) == self.step:
            return
        self.names = {module: short(name) for name, module in nn.Module.named_modules(self.task) if name}
        self.weights = [(short(name), weight) for name, weight in nn.Module.named_parameters(self.task)]
        if self.step < 0:
            self.step = step - 1
            self.add_state(self.trainer.optimizer)
            self.rows = [row | {"restored": True} for row in self.rows]
        self.write()
        self.step, self.depth = step, 0
        self.counts.clear()
        for name, state in random_states():
            self.rows.append({"step": step, "kind": "random", "name": name, "digest": digest(state), "norm": 0.0})

    def add_inputs(self, module: str, inputs: Any) -> None:
        """Record tensors that come from outside of the modules: those that gradients flow through come from others."""
        for name, tensor in tensors(inputs, module):
            if not tensor.requires_grad:
                self.add("input", name, tensor)

    def add_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Record all weights, buffers and states of the optimizer."""
        for name, weight in self.weights:
            self.add("weight", name, weight)
        for name, buffer in nn.Module.named_buffers(self.task):
            self.add("buffer", short(name), buffer)
        for name, weight in self.weights:
            for key, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, (Tensor, int, float)):
                    self.add("state", f"{name}.{key}", torch.as_tensor(value))

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Record one tensor. Its place on a device, and the order of its numbers in memory, make no difference."""
        self.counts[kind, name] += 1
        number = f"#{count}" if (count := self.counts[kind, name]) > 1 else ""
        self.rows.append({"step": self.step, "kind": kind, "name": f"{name}{number}", **describe(tensor)})

    def write(self) -> None:
        """Append the records since the last call to the file."""
        self.file.write("".join(json.dumps(row) + "\n" for row in self.rows).encode())
        self.rows.clear()


def short(name: str) -> str:
    """The name without `model.`, as in checkpoints and patterns."""
    return name.removeprefix("model.")


def tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nested value, named like `module[0][image]`; a value that is a tensor has the name itself."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        yield from tensors(dict(enumerate(value)), name)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors(vars(value), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}[{key}]")


@torch.no_grad()
def describe(tensor: Tensor) -> dict[str, Any]:
    """Return type, digest, norm and sketch of a tensor; of one that is sharded, of the part on this process."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = (local.to_dense() if local.layout != torch.strided else local).detach().cpu().contiguous().reshape(-1)
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(local.shape)}"
    numbers = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    content = kind.encode() + bytes(flat.view(torch.uint8).numpy().data)
    return {"type": kind, "digest": digest(content), "norm": numbers.norm().item(), "sketch": sketch(numbers)}


def sketch(numbers: Tensor) -> list[float]:
    """Return signed sums of the numbers, of fixed random signs. It is linear, and its squares add up, in the mean over
    the signs, to those of the numbers: the distance of two sketches estimates the distance of two tensors."""
    rows = -(-len(numbers) // _COLUMNS)
    table = nn.functional.pad(numbers, (0, rows * _COLUMNS - len(numbers))).view(rows, _COLUMNS)
    sums = (table * signs(_COLUMNS)).view(rows, -1, SKETCH).sum(1)
    return (sums * signs(rows)[:, None]).sum(0).tolist()


@functools.lru_cache(maxsize=256)
def signs(count: int) -> Tensor:
    """Return 1 and -1 at random, the same ones in every process."""
    return torch.randint(2, (count,), generator=torch.Generator().manual_seed(count)).double() * 2 - 1


def digest(content: bytes) -> str:
    """Return 16 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def random_states() -> Iterator[tuple[str, bytes]]:
    """The states of the random generators of this process, by package or kind of device."""
    yield "python", repr(random.getstate()).encode()
    if numpy := sys.modules.get("numpy"):
        _, keys, *rest = numpy.random.get_state()
        yield "numpy", keys.tobytes() + repr(rest).encode()
    yield "torch", bytes(torch.get_rng_state().numpy().data)
    if torch.cuda.is_initialized():
        yield "cuda", bytes(torch.cuda.get_rng_state().numpy().data)
