"""Evaluation, exact on any number of processes: losses, metrics, the best validation."""
