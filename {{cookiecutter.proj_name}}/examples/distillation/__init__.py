"""A small model learns from a large one that was trained before."""
