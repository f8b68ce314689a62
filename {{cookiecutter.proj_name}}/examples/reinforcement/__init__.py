"""Reinforcement learning: the data set gives seeds, the task plays."""
