"""Exact numbers on any number of processes: losses, metrics, the best one."""
