"""Record the environment of a run: the versions of the imported packages, and the machine."""

import platform
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def packages() -> dict[str, str]:
    """Return the version of each installed package of which this process has imported a module, by its name on PyPI."""
    known = _packages_of(tuple(sys.path))
    modules = {module for module in sys.modules if "." not in module} - sys.stdlib_module_names
    # Python 3.10 does not know the modules of some packages; most have the name of their package.
    names = {package for module in modules for package in known.get(module, (module,))}
    # In the one spelling that PyPI compares: `typing_extensions` is `typing-extensions`.
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version_of(name) for name in names if name}
    return dict(sorted((name, version) for name, version in versions.items() if version))


@lru_cache(maxsize=1)
def _packages_of(path: tuple[str, ...]) -> Mapping[str, set[str]]:
    """Return the packages that provide each top-level module on `path`, which is `sys.path`.

    `metadata.packages_distributions` parses every list of files, which takes as long as a tenth of a start.
    """
    packages = defaultdict[str, set[str]](set)
    for record in (file for folder in path for file in Path(folder).glob("*.dist-info/RECORD")):
        declared = record.with_name("top_level.txt")
        listed = declared if declared.exists() else record
        for module in set(re.findall(r"^[^/.\n]+", listed.read_text(encoding="utf-8"), re.MULTILINE)):
            packages[module].add(record.parent.name.partition("-")[0])
    return packages


def version_of(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None


def machine(device: torch.device) -> dict[str, str | int | bool]:
    """Record what affects the last digits of results on this machine: Python, processor, threads, GPU, settings."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    conv: Any = getattr(cudnn, "conv")  # noqa: B009 - not in its types
    gpu: dict[str, str | int | bool] = dict.fromkeys(("driver", "cudnn", "cudnn flags", "tf32"), "not used")
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
        match = re.search(pattern, Path(file).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match[1].strip() if match else ""
