"""Steps with the same bits on any number of processes: docs/parts/reduction.md."""
