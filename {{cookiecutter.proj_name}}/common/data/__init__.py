"""Samples, in an order that is a function of seed and epoch."""
