"""The cluster of stand-ins."""

from tests.tools.slurm.conftest import cluster

__all__ = ["cluster"]  # a fixture
