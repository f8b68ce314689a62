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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

SKETCH = 8  # signed sums per tensor
_COLUMNS = 1024 * SKETCH


def attach(trainer: Any) -> None:
    """Record the steps of this process, as the environment says. Called by the trainer as a plugin."""
    recorder = Recorder(trainer)
    modules.register_module_forward_pre_hook(recorder.before_forward)
    modules.register_module_forward_hook(recorder.after_forward, with_kwargs=True)
    optimizers.register_optimizer_step_pre_hook(recorder.before_update)
    optimizers.register_optimizer_step_post_hook(recorder.after_update)
    torch.autograd.backward = recorder.around_backward(torch.autograd.backward)


class Recorder:
    """Writes the records of one process, a step at a time: a killed process leaves whole lines."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.task, folder = trainer, trainer.task, Path(os.environ["RECORD_DIR"])
        self.detailed_step = int(os.environ.get("RECORD_STEP") or -1)
        self.signal, _, self.signal_step = os.environ.get("RECORD_SIGNAL", "").partition("@")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank{rank}.jsonl").open("ab", buffering=0)
        self.file.write(b"\n")  # ends a line that was cut off
        self.step, self.depth, self.in_backward, self.has_gradients = -1, 0, False, False
        self.rows: list[dict[str, Any]] = []
        self.names: dict[torch.nn.Module, str] = {}
        self.weights: list[tuple[str, Tensor]] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Record what enters a module that no other one calls."""
        if torch.compiler.is_compiling() or not self.is_training():
            return
        self.begin_step()
        if module in self.names:
            self.depth += 1
            if self.depth == 1:
                self.add_inputs(self.names[module], dict(enumerate(inputs)))
                self.entered = len(self.rows)

    def after_forward(self, module: torch.nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        """Record the inputs given by name, and the output and its gradient if the step is recorded in detail."""
        if torch.compiler.is_compiling() or not self.is_training() or module not in self.names:
            return
        self.depth -= 1
        if not self.depth:
            inside, self.rows = self.rows[self.entered :], self.rows[: self.entered]
            self.add_inputs(self.names[module], named)
            self.rows += inside
        if self.step == self.detailed_step:
            for name, tensor in tensors(output, self.names[module]):
                self.add("output", name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self.add, "gradient", name))

    def around_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return `backward`, with the losses recorded that it is called on."""

        @functools.wraps(backward)
        def recorded(losses: Any, *arguments: Any, **options: Any) -> None:
            if not self.is_training():
                return backward(losses, *arguments, **options)
            self.begin_step()
            for _, loss in tensors(losses, ""):
                self.add("loss", "loss", loss)
            self.in_backward = True  # modules called now compute again what they did before
            try:
                return backward(losses, *arguments, **options)
            finally:
                self.in_backward = False

        return recorded

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the gradients, unless the optimizer has them computed itself."""
        self.begin_step()
        self.has_gradients = self.add_gradients()

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Record what the update changed, write the step, and send the signal if it is due."""
        if not self.has_gradients:
            self.add_gradients()
        self.add_state(optimizer)
        self.write()
        if str(self.step) == self.signal_step:
            self.signal_step = ""
            os.kill(os.getpid(), Signals[self.signal])

    def is_training(self) -> bool:
        """Whether this is a part of a training step that is computed for the first time."""
        return bool(self.task.training) and not self.in_backward

    def begin_step(self) -> None:
        """At the first event of a step: write the last one, and record the random generators."""
        step, nn = self.trainer.at.step + 1, torch.nn.Module
        if step == self.step:
            return
        found = {name: module for name, module in nn.named_modules(self.task) if name}
        self.names = {module: name.removeprefix("model.") for name, module in found.items()}
        self.weights = [(name.removeprefix("model."), weight) for name, weight in nn.named_parameters(self.task)]
        if self.step < 0:
            self.step = step - 1
            self.add_state(self.trainer.optimizer)
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

    def add_gradients(self) -> bool:
        """Record the gradients of the weights. Returns whether there were any."""
        found = [(name, weight.grad) for name, weight in self.weights if weight.grad is not None]
        for name, gradient in found:
            self.add("gradient", name, gradient)
        return bool(found)

    def add_state(self, optimizer: Optimizer) -> None:
        """Record all weights, buffers and states of the optimizer."""
        for name, weight in self.weights:
            self.add("weight", name, weight)
        for name, buffer in torch.nn.Module.named_buffers(self.task):
            self.add("buffer", name.removeprefix("model."), buffer)
        for name, weight in self.weights:
            for key, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, (Tensor, int, float)):
                    self.add("state", f"{name}.{key}", torch.as_tensor(value))

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Record one tensor. Its place on a device, and the order of its numbers in memory, make no difference."""
        self.counts[kind, name] += 1
        if (count := self.counts[kind, name]) > 1:
            name = f"{name}#{count}"
        self.rows.append({"step": self.step, "kind": kind, "name": name, **describe(tensor)})

    def write(self) -> None:
        """Append the records since the last call to the file."""
        self.file.write("".join(json.dumps(row) + "\n" for row in self.rows).encode())
        self.rows.clear()


def tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nested value, named like `module[0][image]`; a value that is a tensor has the name itself."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}[{key}]")
    elif isinstance(value, (list, tuple)):
        yield from tensors(dict(enumerate(value)), name)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors(vars(value), name)


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
    table = torch.nn.functional.pad(numbers, (0, rows * _COLUMNS - len(numbers))).view(rows, _COLUMNS)
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
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "cuda", bytes(torch.cuda.get_rng_state().numpy().data)
