"""Loads the emulated accelerator `emu`, when torch is imported (entry point `torch.backends`, see ../build.py).

Variables: EMU_MODE, lazy (work runs when the host waits for it) or eager; EMU_DEVICES; EMU_MEMORY, bytes of each;
EMU_WAITS, a file that gets a line for each wait of the host: what it waited for, and the line of the project that did.
"""

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_PROJECT = os.environ.get("EMU_PROJECT", os.getcwd()) + os.sep
_WAITS = os.environ.get("EMU_WAITS")
DEVICES = int(os.environ.get("EMU_DEVICES", "2"))


def load() -> None:
    """Register the device with torch. Called by torch itself."""
    import emulated_kernels as kernels

    utils: Any = torch.utils  # not in its types
    utils.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", _module(kernels))
    utils.generate_methods_for_privateuse1_backend()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `.to` keeps a parameter's identity, as for CUDA
    if _WAITS:
        kernels.on_wait(_note_wait)
    _add_cells()
    if torch.distributed.is_available():
        from emulated_device.group import register

        register()


def _module(kernels: Any) -> Any:
    """Return `torch.emu`, with what torch and programs ask of `torch.cuda`."""
    module: Any = types.ModuleType("torch.emu")
    accelerator = torch.accelerator
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = accelerator.current_device_index
    module.set_device = lambda device: accelerator.set_device_index(_index(device))
    module.get_device_name = lambda device=None: "Emulated accelerator"
    module.is_bf16_supported = lambda including_emulation=True: True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = kernels.is_forked
    module.queued = kernels.queued
    module.manual_seed = lambda seed: kernels.generator(-1).manual_seed(seed)
    module.manual_seed_all = lambda seed: [kernels.generator(each).manual_seed(seed) for each in range(DEVICES)]
    module.get_rng_state = lambda device=None: kernels.generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=None: kernels.generator(_index(device)).set_state(state)
    module.synchronize = lambda device=None: accelerator.synchronize(_index(device))
    module.memory_allocated = lambda device=None: accelerator.memory_allocated(_index(device))
    module.max_memory_allocated = lambda device=None: accelerator.max_memory_allocated(_index(device))
    module.reset_peak_memory_stats = lambda device=None: accelerator.reset_peak_memory_stats(_index(device))
    module.empty_cache = lambda: None
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: accelerator.current_stream(_index(device))
    module.set_stream = accelerator.set_stream
    module.stream, module.device = _stream, _device
    return module


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


@contextmanager
def _stream(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextmanager
def _device(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _note_wait(reason: str) -> None:
    """Write down a wait, with the innermost line of the project, or of torch if no line of the project leads there."""
    frame, inner = sys._getframe(1), ""
    place = ""
    while frame is not None and not place:
        name = frame.f_code.co_filename
        if name.startswith(_PROJECT):
            place = f"{name.removeprefix(_PROJECT)} {frame.f_code.co_name}"
        elif name.startswith(_HERE) and name.endswith("group.py"):
            return  # exchanges go through host memory here, and not on real devices
        elif not inner and not name.startswith(_HERE):
            inner = f"{os.path.basename(name)} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    with open(f"{_WAITS}.{os.getpid()}", "a") as file:
        file.write(f"{reason}\t{place or inner}\n")


_kept: list[torch.library.Library] = []


def _add_cells() -> None:
    """Add the fused cell of GRUs, which torch has for accelerators only."""
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)

    def cell(inputs: Any, hidden: Any, before: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
        if input_bias is not None:
            inputs, hidden = inputs + input_bias, hidden + hidden_bias
        input_reset, input_update, input_new = inputs.chunk(3, 1)
        hidden_reset, hidden_update, hidden_new = hidden.chunk(3, 1)
        reset = (input_reset + hidden_reset).sigmoid()
        update = (input_update + hidden_update).sigmoid()
        new = (input_new + reset * hidden_new).tanh()
        return new + update * (before - new), torch.cat([reset, update, new, before, hidden_new], 1)

    def backward(gradient: Any, workspace: Any, has_bias: bool) -> Any:
        reset, update, new, before, hidden_new = workspace.chunk(5, 1)
        of_update = gradient * (before - new) * (1 - update) * update
        of_new = gradient * (1 - update) * (1 - new * new)
        of_reset = of_new * hidden_new * (1 - reset) * reset
        inputs = torch.cat([of_reset, of_update, of_new], 1)
        hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
        biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
        return inputs, hidden, gradient * update, *biases

    library.impl("_thnn_fused_gru_cell", cell, "PrivateUse1")
    library.impl("_thnn_fused_gru_cell_backward", backward, "PrivateUse1")
