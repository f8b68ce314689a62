"""Record the environment of a run: the versions of the imported packages, and the machine."""

import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def packages() -> dict[str, str]:
    """Return the versions of the packages that this process has imported, by module."""
    return versions_of({module for module in sys.modules if "." not in module} - sys.stdlib_module_names)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages by name, and of imported modules that have a `__version__`."""
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            version = getattr(sys.modules.get(name), "__version__", None)
            if isinstance(version, str):
                versions[name] = version
    return versions


def machine(device: torch.device) -> dict[str, str | int | bool]:
    """Record what affects the last digits of results on this machine: Python, processor, threads, GPU, settings."""
    cuda = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    conv: Any = getattr(cudnn, "conv")  # noqa: B009 - not in its types
    names = ("driver", "cudnn", "cudnn flags", "tf32")
    gpu: dict[str, str | int | bool] = dict.fromkeys(names, "not used")
    if device.type == "cuda":
        gpu = {
            "device": torch.cuda.get_device_name(device),
            "driver": _line("/proc/driver/nvidia/version", r"Module\b.*?\s(\d[\d.]+)") or "unknown",
            "cudnn": cudnn.version(),
            "cudnn flags": f"deterministic {cudnn.deterministic}, benchmark {cudnn.benchmark}",
            "tf32": f"matmul {cuda.fp32_precision}, conv {conv.fp32_precision}",
        }
    return {
        "python": platform.python_version(),
        "processor": _line("/proc/cpuinfo", r"model name\s*: (.*)") or platform.processor() or "unknown",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": f"{device.type} ({platform.machine()})",
        "cuda": torch.version.cuda or "none",
        **gpu,
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _line(file: str, pattern: str) -> str:
    """Return what `pattern` captures in a system file; "" if it is missing."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(pattern, text)
    return match[1].strip() if match else ""
