"""Floating point operations of a call."""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


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
