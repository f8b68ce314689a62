"""Results per sample: kept on the CPU during a pass, then put into the order of the data set."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.distributed import Rank, gather_to_main

Results = dict[str, Any]
"""Results by name, one entry per sample: a tensor with the samples as first dimension, or a list."""


class SampleBuffer:
    """Results of one metric for the samples of this process, until they are gathered."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._batches: list[tuple[int, Results]] = []  # of each batch, its first sample and its results

    def add(self, results: Results, indices: Sequence[int]) -> None:
        """Keep the metric's results for a batch of the samples `indices` of the data set."""
        for name, value in results.items():
            if len(value) != len(indices):
                raise UserError(
                    f"metric.{self._metric}: every result must have one entry per sample, but {name} has {len(value)} "
                    f"for {len(indices)} samples"
                )
        # A copy on the CPU too: a worker's tensor keeps a file of shared memory open, and a view its whole base alive.
        own = map_tensors(results, lambda tensor: tensor.detach().to("cpu", copy=True))
        self._batches.append((indices[0], own))

    def gather(self, rank: Rank) -> Results:
        """The results of all processes, in the order of the data set, on the main process; nothing on the others."""
        gathered = chain.from_iterable(gather_to_main(self._batches, rank))
        batches = [results for _, results in sorted(gathered, key=lambda batch: batch[0])]
        return {name: _joined([results[name] for results in batches]) for name in batches[0]} if batches else {}


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain.from_iterable(parts))
