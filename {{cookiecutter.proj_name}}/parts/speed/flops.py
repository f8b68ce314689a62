"""Floating point operations of a call, and the most that a device can do in a second."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# Dense peaks in TFLOP/s from the makers' data sheets, by a pattern of the device's name as torch gives it: of bf16 and
# fp16 with sums in fp32, of TF32, and of fp32. The first pattern that matches counts.
PEAKS = {
    "B200": (2250, 1100, 75), "H100 NVL": (835, 417, 60), "H100 PCIe": (756, 378, 51.2), "G?H[12]00": (989, 494, 66.9),
    "A100": (312, 156, 19.5), "A40": (149.7, 74.8, 37.4), "A30": (165, 82, 10.3), "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6), "L40": (181, 90.5, 90.5), "L4": (121, 60, 30.3), "T4": (65, 8.1, 8.1),
    "RTX 6000 Ada": (364, 182, 91.1), "RTX A6000": (154.8, 77.4, 38.7), "V100-PCIE": (112, 14, 14),
    "V100": (125, 15.7, 15.7), "RTX 5090": (209.5, 104.8, 104.8), "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6), "MI300X": (1307, 654, 163.4),
}  # fmt: skip


def peak_tflops(device: str, mode: str) -> float:
    """Return the peak of a device by its name, in the dtype of `precision.mode`; 0 if it is unknown."""
    peaks = next((peaks for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", device)), (0, 0, 0))
    single = 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2
    return {"bf16": peaks[0], "fp16": peaks[0], "fp32": peaks[single]}.get(mode, 0)


def count_flops(call: Callable[[], object]) -> Counter[str]:
    """Floating point operations by module, with all that it contains; `Global` is the whole call.

    They are 2 for each multiplication and addition of matrix products and convolutions. Compiled modules run as if they
    were not; what is computed again in the backward pass (activation checkpointing) counts once.
    """
    # The counter misses the fused kernel of CPUs. To import the compiler takes seconds.
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with FlopCounterMode(display=False) as counter, kernels, eager:
        call()
    return Counter({name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()})
