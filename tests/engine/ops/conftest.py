"""The kernels, built once for all tests."""

from tests.ops.conftest import build_dir, built

__all__ = ["build_dir", "built"]  # fixtures
