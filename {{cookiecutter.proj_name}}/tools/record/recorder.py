"""A plugin for train.py that writes a digest of every tensor of a training step to `$RECORD_DIR/rank<k>.jsonl`:
PYTHONPATH=tools/record RECORD_DIR=/tmp/record python train.py --config FILE --plugins '[recorder.attach]'

A line per tensor, in the order of events: step, kind, name, type, digest of its bytes, norm, and a sketch, from which
the distance of two tensors is estimated. At the start of a run or resume, weights, buffers and optimizer states are
those of the step before; later ones are those after the step. The second tensor of a name in a step has the name
`name#2`. With RECORD_STEP=12, step 12 also has the output of each module and its gradient. With
RECORD_SIGNAL=SIGKILL@7, each process sends itself this signal after its first optimizer step of step 7.

Recorded are: before a step, the random generators; in it, inputs of modules that no gradient flows through, and what
`torch.autograd.backward` is called on, the loss; after its update, gradients, weights, buffers and optimizer states.

It needs only torch and numpy, and torch's global hooks, so that it records earlier commits of a project too. Parts of a
model that are compiled are not recorded; what they compute is seen in the loss and the gradients.
"""

import functools
import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from signal import Signals
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

SKETCH = 8  # signed sums per tensor


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
        self.detailed_step = os.environ.get("RECORD_STEP", "")
        self.signal, _, self.signal_step = os.environ.get("RECORD_SIGNAL", "").partition("@")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank{rank}.jsonl").open("ab", buffering=0)
        self.file.write(b"\n")  # ends a line that was cut off
        self.step, self.plain_backward, self.in_backward = -1, torch.autograd.backward, False
        self.rows: list[dict[str, Any]] = []
        self.names: dict[nn.Module, str] = {}
        self.weights: list[tuple[str, Tensor]] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Record what enters a module."""
        if self.is_training():
            self.begin_step()
            self.add_inputs(module, dict(enumerate(inputs)))

    def after_forward(self, module: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        """Record the inputs given by name, and the output and its gradient if the step is recorded in detail."""
        if not self.is_training():
            return
        self.add_inputs(module, named)
        if module in self.names and str(self.step) == self.detailed_step:
            for name, tensor in tensors(output, self.names[module]):
                self.add("output", name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self.add, "output gradient", name))

    def backward(self, losses: Any, *arguments: Any, **options: Any) -> None:
        """Record the losses that `torch.autograd.backward` is called on, and call it."""
        if self.is_training():
            self.begin_step()
            for _, loss in tensors(losses, ""):
                self.add("loss", "in total", loss)
        outer, self.in_backward = self.in_backward, True
        try:
            self.plain_backward(losses, *arguments, **options)
        finally:
            self.in_backward = outer

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record gradients and what the update changed, write it, and send the signal if it is due."""
        if optimizer is not self.trainer.optimizer:  # a part of it
            return
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
        """Return whether this is in a training step; in a backward pass, modules only repeat what they computed."""
        return not torch.compiler.is_compiling() and bool(self.task.training) and not self.in_backward

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
        self.step = step
        self.counts.clear()
        for name, state in random_states():
            self.rows.append({"step": step, "kind": "random", "name": name, "digest": digest(state), "norm": 0.0})

    def add_inputs(self, module: nn.Module, inputs: Mapping[Any, Any]) -> None:
        """Record tensors without a gradient: the data. Others are outputs of modules before."""
        if module in self.names:
            for name, tensor in tensors(inputs, self.names[module]):
                if not tensor.requires_grad:
                    self.add("input", name, tensor)

    def add_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Record all weights, buffers and states of the optimizer."""
        for name, weight in self.weights:
            self.add("weight", name, weight)
        # What each process changes on its own, see docs/task.md.
        own = [f"{above}.{pattern}".removeprefix(".") for above, module in nn.Module.named_modules(self.task)
               for pattern in getattr(module, "own_buffers", ())]  # fmt: skip
        for name, buffer in nn.Module.named_buffers(self.task):
            is_own = any(fnmatchcase(name, pattern) for pattern in own)
            self.add("own buffer" if is_own else "buffer", short(name), buffer)
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
    """Return the name without `model.`, as in checkpoints and patterns."""
    return name.removeprefix("model.")


def tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, named like `module[0][image]`; a tensor itself has the name as it is."""
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
    flat = local.detach().to_dense().cpu().contiguous().reshape(-1)
    kind, numbers = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(local.shape)}", flat.double()
    content = kind.encode() + bytes(flat.view(torch.uint8).numpy().data)
    return {"type": kind, "digest": digest(content), "norm": numbers.norm().item(), "sketch": sketch(numbers)}


def sketch(numbers: Tensor) -> list[float]:
    """Return signed sums of the numbers, of random signs that are always the same. It is linear, and in the mean over
    the signs, its squares add up to those of the numbers: so the distance of two sketches is about that of the tensors.
    """
    signs = torch.randint(2, numbers.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8) * 2 - 1
    return nn.functional.pad(numbers * signs, (0, -len(numbers) % SKETCH)).view(-1, SKETCH).sum(0).tolist()


def digest(content: bytes) -> str:
    """Return 16 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def random_states() -> Iterator[tuple[str, bytes]]:
    """Yield the states of the random generators of this process, by package or kind of device."""
    yield "python", repr(random.getstate()).encode()
    yield "numpy", repr(numpy.random.get_state()).encode()
    yield "torch", bytes(torch.get_rng_state().numpy().data)
    device = torch.accelerator.current_accelerator()
    if device is not None and device.type != "mps" and torch.get_device_module(device).is_initialized():
        yield device.type, bytes(torch.get_device_module(device).get_rng_state().numpy().data)
