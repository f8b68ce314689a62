"""Reinforcement learning: the dataset gives seeds, the task plays."""
